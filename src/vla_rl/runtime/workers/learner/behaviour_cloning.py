"""Behaviour cloning of one rank: supervised optimiser steps on demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from attrs import frozen

from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, Observation
from vla_rl.runtime.messages.learning import ImitationStep
from vla_rl.runtime.workers.learner import optimizer
from vla_rl.runtime.workers.learner.trained_model import TrainedModel
from vla_rl.toolkit.data.augmentation import augment


@frozen
class MicroBatch:
    """Samples of one forward pass."""

    step: ImitationStep
    start: int
    """Number of the first sample within the rank's."""
    indices: Array
    """Indices into the rank's samples, int64 [B]."""


class CloningUpdate:
    """Updates of the policy that imitate demonstrations."""

    def __init__(
        self, trained: TrainedModel, demonstrations: Demonstrations | None, heartbeat: Callable[[], None]
    ) -> None:
        """Create the updates. `heartbeat` is called before each pass."""
        self.demonstrations = demonstrations
        """This rank's demonstrations, if it has any."""
        self._trained = trained
        self._heartbeat = heartbeat

    def update(self, steps: Sequence[ImitationStep]) -> float:
        """Make optimiser steps, in micro-batches. Return the sum of the losses of this rank's samples."""
        trained = self._trained
        micro_batches = [self._micro_batches(step) for step in steps]
        losses = [torch.zeros((), device=trained.device)]
        samples = self._read_ahead([micro_batch for of_step in micro_batches for micro_batch in of_step])
        with trained.released():
            for step, of_step in zip(steps, micro_batches, strict=True):
                losses.append(self._step(step, of_step, samples))
            trained.check_finite()
        return float(torch.stack(losses).sum())

    def _micro_batches(self, step: ImitationStep) -> list[MicroBatch]:
        size = self._trained.train.micro_batch
        return [
            MicroBatch(step=step, start=start, indices=step.indices[start : start + size])
            for start in range(0, len(step.indices), size)
        ]

    def _step(
        self, step: ImitationStep, micro_batches: Sequence[MicroBatch], samples: Iterator[tuple[Observation, Any]]
    ) -> torch.Tensor:
        """Make one optimiser step on the next samples. Return the sum of their losses."""
        trained = self._trained
        optimizer.set_rate(trained.optimizer, step.lr)
        trained.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=trained.device)
        with trained.adapters_cast_once():
            for micro_batch in micro_batches:
                self._heartbeat()
                obs, actions = next(samples)
                loss = trained.imitation_loss(obs, actions) * len(micro_batch.indices)
                (loss / step.total).backward()
                total = total + loss.detach()
        most = -(-step.most // trained.train.micro_batch)  # micro-batches of the rank that has the most
        for _ in range(trained.dummy_passes(most, len(micro_batches))):
            (0 * trained.imitation_loss(trained.dummy.obs, trained.dummy.actions)).backward()
        trained.optimizer_step("imitation", total)
        return total

    def _read_ahead(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Observation, Any]]:
        """Yield the samples of micro-batches; the next ones are read while the last ones are trained on."""
        if self.demonstrations is None or not micro_batches:
            return
        with ThreadPoolExecutor(1, "demonstrations") as reader:
            following = reader.submit(self._read, self.demonstrations, micro_batches[0])
            for micro_batch in micro_batches[1:]:
                ready, following = following, reader.submit(self._read, self.demonstrations, micro_batch)
                yield ready.result()
            yield following.result()

    @staticmethod
    def _read(demonstrations: Demonstrations, micro_batch: MicroBatch) -> tuple[Observation, Any]:
        step = micro_batch.step
        obs, actions = demonstrations.read_samples(micro_batch.indices)
        if step.augment is not None:
            obs = augment(obs, step.augment, step.seed, step.step, step.first + micro_batch.start)
        return obs, actions
