"""`behaviour_cloning`: the policy imitates demonstrations."""

from __future__ import annotations

from vla_rl.core.declarations import TrainerPlugin, TrainingData

plugin = TrainerPlugin(
    config="vla_rl.toolkit.no_settings:NoSettings",
    build="vla_rl.plugins.trainers.behaviour_cloning.impl:BehaviourCloning",
    summary="imitates demonstrations",
    trains_on=TrainingData.DEMONSTRATIONS,
)
