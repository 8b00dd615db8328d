"""Behaviour cloning of one rank: supervised optimiser steps on demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import torch
from torch import nn

from vla_rl.core.trainers import DemonstrationsData, Trainer, UpdateMetrics
from vla_rl.toolkit.no_settings import NoSettings
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.imitation import imitate_demonstrations


class BehaviourCloning(Trainer[DemonstrationsData]):
    """Trainer of the policy that imitates demonstrations."""

    def __init__(self, config: NoSettings, context: TrainerContext) -> None:
        self._trained = context.trained
        self._heartbeat = context.heartbeat

    def modules(self) -> Mapping[str, nn.Module]:
        return {"policy": self._trained.model.module}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return {"policy": self._trained.optimizer}

    def update(self, data: DemonstrationsData) -> UpdateMetrics:
        """Make optimiser steps, in micro-batches. "loss/imitation" sums the losses of this rank's samples."""
        before = perf_counter()
        total = float(imitate_demonstrations(self._trained, data.demonstrations, data.steps, self._heartbeat))
        return UpdateMetrics(sums={"loss/imitation": total}, seconds=perf_counter() - before)
