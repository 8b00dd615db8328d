"""Hook `lerobot`: writes episodes of rollouts and evaluations to a data set in LeRobot's format."""

from __future__ import annotations

from vla_rl.core.declarations import HookPlugin

plugin = HookPlugin(
    config="vla_rl.plugins.hooks.lerobot.config:LeRobotHookConfig",
    build="vla_rl.plugins.hooks.lerobot.recorder:LeRobotRecorder",
    summary="episodes as a data set in LeRobot's format 3.0",
    extra="data",
    check="vla_rl.plugins.hooks.lerobot.recorder:check_data_set",
    files=lambda config: ("lerobot",) if config.folder is None else (),
)
