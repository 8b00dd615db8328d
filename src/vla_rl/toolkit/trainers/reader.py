"""Reading of data in a thread while earlier data are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.trainers import ImitationStep
from vla_rl.core.types import Observation
from vla_rl.toolkit.data.augmentation import augment_images

S = TypeVar("S")
T = TypeVar("T")


def read_in_background(read: Callable[[S], T], parts: Sequence[S]) -> Iterator[T]:
    """Yield `read(part)` for each part. One thread reads the next one while the last one is used."""
    if not parts:
        return
    with ThreadPoolExecutor(1, "reader") as reader:
        following = reader.submit(read, parts[0])
        for part in parts[1:]:
            ready, following = following, reader.submit(read, part)
            yield ready.result()
        yield following.result()


def read_ahead(
    read: Callable[[ImitationStep, int], T], steps: Sequence[ImitationStep], micro_batch: int
) -> Iterator[T]:
    """Return `read(step, start)` of optimiser steps' micro-batches. A thread reads the next while one is trained on.

    Args:
        read: reads the micro-batch whose first sample has this number within the rank's share of the step.
        micro_batch: most samples of a micro-batch; none spans two steps.
    """
    parts = [(step, start) for step in steps for start in range(0, len(step.indices), micro_batch)]
    return read_in_background(lambda part: read(*part), parts)


def read_samples(
    demonstrations: Demonstrations, step: ImitationStep, start: int, micro_batch: int
) -> tuple[Observation, Any]:
    """Return the samples of a micro-batch, with the images augmented as the step says."""
    obs, actions = demonstrations.read_samples(step.indices[start : start + micro_batch])
    if step.augment is not None:
        obs = augment_images(obs, step.augment, step.seed, step.number, step.first + start)
    return obs, actions
