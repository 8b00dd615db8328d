"""`classifier`: judges success from camera images with a small network that `vla-rl fit-rewards` trained."""

from __future__ import annotations

from vla_rl.core.declarations import RewardModelPlugin

plugin = RewardModelPlugin(
    config="vla_rl.plugins.reward_models.classifier.config:ClassifierConfig",
    build="vla_rl.plugins.reward_models.classifier.impl:ClassifierRewards",
    summary="success learnt from camera images",
    check="vla_rl.plugins.reward_models.classifier.config:check_folder",
)
