"""`policy_gradient`: updates of the policy by the loss of an algorithm (ppo, grpo, gipo, srpo ...)."""

from __future__ import annotations

from vla_rl.core.declarations import TrainerPlugin, TrainingData

plugin = TrainerPlugin(
    config="vla_rl.toolkit.no_settings:NoSettings",
    build="vla_rl.plugins.trainers.policy_gradient.impl:PolicyGradient",
    summary="takes the loss of the spec's algorithm",
    trains_on=TrainingData.TRAJECTORIES,
)
