"""`lerobot`: reads demonstrations from a dataset in LeRobot's format, versions 2 and 3, in a local folder."""

from __future__ import annotations

from vla_rl.core.declarations import DataPlugin

plugin = DataPlugin(
    config="vla_rl.plugins.data.lerobot.config:LeRobotConfig",
    build="vla_rl.plugins.data.lerobot.dataset:LeRobotData",
    summary="a data set in LeRobot's format",
    extra="data",
    check="vla_rl.plugins.data.lerobot.checks:check_data_set",
    inspect="vla_rl.plugins.data.lerobot.inspection:open_recordings",
    files=("meta/info.json",),
)
