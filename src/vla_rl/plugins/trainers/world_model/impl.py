"""Fitting of a world model, which brings its own losses and optimisers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vla_rl.core.contexts import WorldModelTrainerContext
from vla_rl.core.trainers import Trainer, UpdateMetrics, WindowData
from vla_rl.toolkit.no_settings import NoSettings


class WorldModelTrainer(Trainer[WindowData]):
    """Trainer of a world model by its own `fit`."""

    def __init__(self, config: NoSettings, context: WorldModelTrainerContext) -> None:
        self._model = context.world_model

    def modules(self) -> Mapping[str, nn.Module]:
        module = self._model.module
        return {} if module is None else {"world_model": module}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return none: they are the world model's own, and `state` has their state."""
        return {}

    def update(self, data: WindowData) -> UpdateMetrics:
        return UpdateMetrics(sums=self._model.fit(data.windows, data.noise))

    def state(self) -> Mapping[str, Any]:
        return self._model.training_state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._model.load_training_state(state)
