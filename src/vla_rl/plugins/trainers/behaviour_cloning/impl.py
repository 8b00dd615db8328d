"""Behaviour cloning of one rank: supervised optimiser steps on demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn

from vla_rl.core.trainers import DemonstrationData, ImitationStep, Trainer, UpdateMetrics
from vla_rl.core.types import Array, Observation
from vla_rl.toolkit.trainers import optimizers
from vla_rl.toolkit.trainers.context import TrainingContext
from vla_rl.toolkit.trainers.read_ahead import read_ahead


class BehaviourCloning(Trainer):
    """Trainer of the policy that imitates demonstrations."""

    def __init__(self, training: TrainingContext) -> None:
        self._trained = training.trained
        self._heartbeat = training.heartbeat

    def modules(self) -> Mapping[str, nn.Module]:
        return {"policy": self._trained.model.module}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return {"policy": self._trained.optimizer}

    def update(self, data: DemonstrationData) -> UpdateMetrics:
        """Make optimiser steps, in micro-batches. "loss/imitation" sums the losses of this rank's samples."""
        before = perf_counter()
        trained = self._trained
        size = trained.train.micro_batch
        micro_batches = [[step.indices[i : i + size] for i in range(0, len(step.indices), size)] for step in data.steps]
        losses = [torch.zeros((), device=trained.device)]
        samples: Iterator[tuple[Observation, Any]] = iter(())
        if data.demonstrations is not None:
            samples = read_ahead(
                data.demonstrations.read_samples, [batch for of_step in micro_batches for batch in of_step]
            )
        with trained.released():
            for step, of_step in zip(data.steps, micro_batches, strict=True):
                losses.append(self._step(step, of_step, samples))
            trained.check_finite()
        total = float(torch.stack(losses).sum())
        return UpdateMetrics(sums={"loss/imitation": total}, seconds=perf_counter() - before)

    def _step(
        self, step: ImitationStep, micro_batches: Sequence[Array], samples: Iterator[tuple[Observation, Any]]
    ) -> torch.Tensor:
        """Make one optimiser step on the next samples. Return the sum of their losses."""
        trained = self._trained
        optimizers.set_rate(trained.optimizer, step.lr)
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
