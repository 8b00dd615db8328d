"""Optimiser steps on demonstrations, for trainers that clone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.trainers import ImitationStep
from vla_rl.core.types import Array, Observation
from vla_rl.toolkit.trainers import optimizer
from vla_rl.toolkit.trainers.reader import read_ahead, read_samples
from vla_rl.toolkit.trainers.trained_model import TrainedModel

T = TypeVar("T")


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

    def compute_loss(sample: tuple[Observation, Any, Array | None]) -> torch.Tensor:
        return trained.imitation_loss(*sample) * len(sample[0])

    with trained.released():
        losses += [make_policy_step(trained, step, samples, compute_loss, heartbeat) for step in steps]
        trained.check_finite()
    return torch.stack(losses).sum()


def make_policy_step(
    trained: TrainedModel,
    step: ImitationStep,
    samples: Iterator[T],
    compute_loss: Callable[[T], torch.Tensor],
    heartbeat: Callable[[], None],
) -> torch.Tensor:
    """Make one optimiser step of the policy on the next micro-batches. Return the sum of their losses.

    Args:
        compute_loss: returns the sum of the losses of a micro-batch.
        heartbeat: called before each pass.
    """
    passes, most_passes = (-(-count // trained.train.micro_batch) for count in (len(step.indices), step.most))
    optimizer.set_rate(trained.optimizer, step.lr)
    trained.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=trained.device)
    with trained.adapters_cast_once():
        for _ in range(passes):
            heartbeat()
            loss = compute_loss(next(samples))
            (loss / step.total).backward()
            total = total + loss.detach()
    for _ in range(trained.dummy_passes(most_passes, passes)):
        (0 * trained.imitation_loss(trained.dummy_inputs.obs, trained.dummy_inputs.actions)).backward()
    trained.optimizer_step("imitation", total)
    return total
