"""`robotwin`: RoboTwin 2.0, two-arm tasks on SAPIEN. See docs/simulators/robotwin.md."""

from __future__ import annotations

from vla_rl.core.declarations import EnvPlugin

plugin = EnvPlugin(
    config="vla_rl.plugins.envs.robotwin.config:RobotwinConfig",
    build="vla_rl.plugins.envs.robotwin.env:make_env",
    summary="RoboTwin 2.0: 50 tasks for two arms, SAPIEN; in a separate interpreter (env.python)",
    expert=True,
    preflight="vla_rl.plugins.envs.robotwin.checks:check_files",
    check="vla_rl.plugins.envs.robotwin.checks:check_installation",
    lacks="vla_rl.plugins.envs.robotwin.interpreter:find_missing",
    action_dim="vla_rl.plugins.envs.robotwin.config:action_dim",
)
