"""`world_model`: optimiser steps of a world model on windows of recorded episodes."""

from __future__ import annotations

from vla_rl.core.declarations import TrainerPlugin, TrainingData

plugin = TrainerPlugin(
    config="vla_rl.toolkit.no_settings:NoSettings",
    build="vla_rl.plugins.trainers.world_model.impl:WorldModelTrainer",
    summary="fits the world model to recorded windows",
    trains_on=TrainingData.WINDOWS,
)
