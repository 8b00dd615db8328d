"""Behaviour cloning of one rank: supervised optimiser steps on demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from vla_rl.core.trainers import DemonstrationsData, ImitationStep, Trainer, UpdateMetrics
from vla_rl.core.types import Observation
from vla_rl.toolkit.trainers import optimizer
from vla_rl.toolkit.trainers.context import TrainingContext
from vla_rl.toolkit.trainers.demonstration_reader import read_ahead, read_samples


class BehaviourCloning(Trainer):
    """Trainer of the policy that imitates demonstrations."""

    def __init__(self, training: TrainingContext) -> None:
        self._trained = training.trained
        self._heartbeat = training.heartbeat

    def modules(self) -> Mapping[str, nn.Module]:
        return {"policy": self._trained.model.module}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return {"policy": self._trained.optimizer}

    def update(self, data: DemonstrationsData) -> UpdateMetrics:
        """Make optimiser steps, in micro-batches. "loss/imitation" sums the losses of this rank's samples."""
        before = perf_counter()
        trained = self._trained
        losses = [torch.zeros((), device=trained.device)]
        size = trained.train.micro_batch
        samples: Iterator[tuple[Observation, Any]] = iter(())
        if data.demonstrations is not None:
            read = partial(read_samples, data.demonstrations, micro_batch=size)
            samples = read_ahead(read, data.steps, size)
        with trained.released():
            losses += [self._step(step, samples) for step in data.steps]
            trained.check_finite()
        total = float(torch.stack(losses).sum())
        return UpdateMetrics(sums={"loss/imitation": total}, seconds=perf_counter() - before)

    def _step(self, step: ImitationStep, samples: Iterator[tuple[Observation, Any]]) -> torch.Tensor:
        """Make one optimiser step on the next samples. Return the sum of their losses."""
        trained = self._trained
        passes, most_passes = (-(-count // trained.train.micro_batch) for count in (len(step.indices), step.most))
        optimizer.set_rate(trained.optimizer, step.lr)
        trained.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=trained.device)
        with trained.adapters_cast_once():
            for _ in range(passes):
                self._heartbeat()
                obs, actions = next(samples)
                loss = trained.imitation_loss(obs, actions) * len(obs)
                (loss / step.total).backward()
                total = total + loss.detach()
        for _ in range(trained.dummy_passes(most_passes, passes)):
            (0 * trained.imitation_loss(trained.dummy.obs, trained.dummy.actions)).backward()
        trained.optimizer_step("imitation", total)
        return total
