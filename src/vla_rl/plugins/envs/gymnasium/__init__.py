"""`gymnasium`: any registered gymnasium environment with continuous actions. See docs/simulators/gymnasium.md."""

from __future__ import annotations

from vla_rl.core.declarations import EnvPlugin

plugin = EnvPlugin(
    config="vla_rl.plugins.envs.gymnasium.config:GymnasiumConfig",
    build="vla_rl.plugins.envs.gymnasium.single_env:make_envs",
    summary="Any gymnasium environment with continuous actions and an image, from a spec alone",
    preflight="vla_rl.plugins.envs.gymnasium.single_env:try_out",
    check="vla_rl.plugins.envs.gymnasium.simulator:check_environment",
    action_dim=lambda config: None if config.action_low is None else len(config.action_low),
)
