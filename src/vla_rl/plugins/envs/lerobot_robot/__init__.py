"""`lerobot_robot`: a real robot, driven through lerobot's classes `Robot` and `Teleoperator`. See
docs/simulators/lerobot_robot.md."""

from __future__ import annotations

from vla_rl.core.declarations import EnvPlugin

plugin = EnvPlugin(
    config="vla_rl.plugins.envs.lerobot_robot.config:LeRobotRobotConfig",
    build="vla_rl.plugins.envs.lerobot_robot.env:make_env",
    summary="a real robot through lerobot's Robot and Teleoperator; in a separate interpreter (env.python)",
    preflight="vla_rl.plugins.envs.lerobot_robot.device_process:check_robot",
    lacks="vla_rl.plugins.envs.lerobot_robot.interpreter:find_missing",
)
