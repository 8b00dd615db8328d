"""Reading of demonstrations while earlier ones are trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.trainers import ImitationStep
from vla_rl.core.types import Observation
from vla_rl.toolkit.data.augmentation import augment

STEP = tuple[ImitationStep, int]
"""An optimiser step, and the number of a micro-batch's first sample within the rank's share of it."""


def read_ahead(
    demonstrations: Demonstrations | None, steps: Sequence[ImitationStep], micro_batch: int
) -> Iterator[tuple[Observation, Any]]:
    """Yield the samples of optimiser steps in micro-batches, with the pictures augmented as the steps say. The next
    samples are read while the last ones are trained on.

    Args:
        micro_batch: most samples of a micro-batch; none spans two steps.
    """
    parts = [(step, start) for step in steps for start in range(0, len(step.indices), micro_batch)]
    if demonstrations is None or not parts:
        return

    def read(part: STEP) -> tuple[Observation, Any]:
        step, start = part
        obs, actions = demonstrations.read_samples(step.indices[start : start + micro_batch])
        if step.augment is not None:
            obs = augment(obs, step.augment, step.seed, step.number, step.first + start)
        return obs, actions

    with ThreadPoolExecutor(1, "demonstrations") as reader:
        following = reader.submit(read, parts[0])
        for part in parts[1:]:
            ready, following = following, reader.submit(read, part)
            yield ready.result()
        yield following.result()
