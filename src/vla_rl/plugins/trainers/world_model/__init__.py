"""`world_model`: optimiser steps of a world model on windows of recorded episodes."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from vla_rl.core.types import Context, Plugin, TrainingData


@frozen(kw_only=True)
class WorldModelTrainerConfig:
    """Spec keys of the trainer `world_model`: none, `imagination` has them."""


def build(config: WorldModelTrainerConfig, context: Context) -> Any:
    from vla_rl.plugins.trainers.world_model.impl import WorldModelTrainer

    return WorldModelTrainer(context.training)


plugin = Plugin(
    config=WorldModelTrainerConfig,
    build=build,
    summary="fits the world model to recorded windows",
    trains_on=TrainingData.WINDOWS,
)
