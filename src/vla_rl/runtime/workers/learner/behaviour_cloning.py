"""Behaviour cloning of one rank: supervised optimiser steps on demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, Observation
from vla_rl.runtime.messages.learning import ImitationStep
from vla_rl.runtime.workers.learner import optimizer
from vla_rl.runtime.workers.learner.trained_model import TrainedModel


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
        size = trained.train.micro_batch
        micro_batches = [[step.indices[i : i + size] for i in range(0, len(step.indices), size)] for step in steps]
        losses = [torch.zeros((), device=trained.device)]
        samples = self._read_ahead([indices for of_step in micro_batches for indices in of_step])
        with trained.released():
            for step, of_step in zip(steps, micro_batches, strict=True):
                losses.append(self._step(step, of_step, samples))
            trained.check_finite()
        return float(torch.stack(losses).sum())

    def _step(
        self, step: ImitationStep, micro_batches: Sequence[Array], samples: Iterator[tuple[Observation, Any]]
    ) -> torch.Tensor:
        """Make one optimiser step on the next samples. Return the sum of their losses."""
        trained = self._trained
        optimizer.set_rate(trained.optimizer, step.lr)
        trained.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=trained.device)
        with trained.adapters_cast_once():
            for indices in micro_batches:
                self._heartbeat()
                obs, actions = next(samples)
                loss = trained.imitation_loss(obs, actions) * len(indices)
                (loss / step.total).backward()
                total = total + loss.detach()
        most = -(-step.most // trained.train.micro_batch)  # micro-batches of the rank that has the most
        for _ in range(trained.dummy_passes(most, len(micro_batches))):
            (0 * trained.imitation_loss(trained.dummy.obs, trained.dummy.actions)).backward()
        trained.optimizer_step("imitation", total)
        return total

    def _read_ahead(self, micro_batches: Sequence[Array]) -> Iterator[tuple[Observation, Any]]:
        """Yield the demonstrations with these indices; the next ones are read while the last ones are trained on."""
        if self.demonstrations is None or not micro_batches:
            return
        with ThreadPoolExecutor(1, "demonstrations") as reader:
            following = reader.submit(self.demonstrations.read_samples, micro_batches[0])
            for indices in micro_batches[1:]:
                ready, following = following, reader.submit(self.demonstrations.read_samples, indices)
                yield ready.result()
            yield following.result()
