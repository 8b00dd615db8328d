"""`person`: a person next to the robot judges success, resets the scene, and can stop the robot."""

from __future__ import annotations

from vla_rl.core.declarations import RewardModelPlugin

plugin = RewardModelPlugin(
    config="vla_rl.plugins.reward_models.person.config:PersonConfig",
    build="vla_rl.plugins.reward_models.person.impl:PersonRewards",
    summary="a person judges success, resets the scene and stops the robot",
    check="vla_rl.plugins.reward_models.person.config:check_one_env",
)
