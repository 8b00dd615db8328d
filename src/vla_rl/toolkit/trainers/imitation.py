"""Optimiser steps on demonstrations, for trainers that clone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.trainers import ImitationStep
from vla_rl.core.types import Array, Observation
from vla_rl.toolkit.trainers import optimizer
from vla_rl.toolkit.trainers.demonstration_reader import read_ahead, read_samples
from vla_rl.toolkit.trainers.trained_model import TrainedModel


def imitate_demonstrations(
    trained: TrainedModel,
    demonstrations: Demonstrations | None,
    steps: Sequence[ImitationStep],
    heartbeat: Callable[[], None],
) -> torch.Tensor:
    """Make optimiser steps with the model's imitation loss, in micro-batches. Return the sum of the losses of this
    rank's samples, on the device. Raises UserError for a loss that is not finite.

    Args:
        demonstrations: what the steps' indices refer to; None: the rank has none, and only joins the reduction.
        heartbeat: called before each pass.
    """
    losses = [torch.zeros((), device=trained.device)]
    size = trained.train.micro_batch
    samples: Iterator[tuple[Observation, Any, Array | None]] = iter(())
    if demonstrations is not None:

        def read(step: ImitationStep, start: int) -> tuple[Observation, Any, Array | None]:
            recorded = demonstrations.recorded_actions(step.indices[start : start + size])
            return *read_samples(demonstrations, step, start, size), recorded

        samples = read_ahead(read, steps, size)
    with trained.released():
        losses += [_make_step(trained, step, samples, heartbeat) for step in steps]
        trained.check_finite()
    return torch.stack(losses).sum()


def _make_step(
    trained: TrainedModel,
    step: ImitationStep,
    samples: Iterator[tuple[Observation, Any, Array | None]],
    heartbeat: Callable[[], None],
) -> torch.Tensor:
    """Make one optimiser step on the next samples. Return the sum of their losses."""
    passes, most_passes = (-(-count // trained.train.micro_batch) for count in (len(step.indices), step.most))
    optimizer.set_rate(trained.optimizer, step.lr)
    trained.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=trained.device)
    with trained.adapters_cast_once():
        for _ in range(passes):
            heartbeat()
            obs, actions, recorded = next(samples)
            loss = trained.imitation_loss(obs, actions, recorded) * len(obs)
            (loss / step.total).backward()
            total = total + loss.detach()
    for _ in range(trained.dummy_passes(most_passes, passes)):
        (0 * trained.imitation_loss(trained.dummy_inputs.obs, trained.dummy_inputs.actions)).backward()
    trained.optimizer_step("imitation", total)
    return total
