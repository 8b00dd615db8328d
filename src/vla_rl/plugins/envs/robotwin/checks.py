"""Checks of the settings of `robotwin` that need no simulator."""

from __future__ import annotations

from pathlib import Path

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.robotwin.assets import asset_root
from vla_rl.plugins.envs.robotwin.config import RobotwinConfig, is_file
from vla_rl.plugins.envs.robotwin.installation import find_installation
from vla_rl.plugins.envs.robotwin.seeds import SeedBook
from vla_rl.plugins.envs.robotwin.tasks import task_names


def check_installation(config: RobotwinConfig, context: CheckContext) -> None:
    """Raise UserError for files, settings and seeds that are missing, or if RoboTwin is not installed."""
    check_files(config)
    find_installation(config)


def check_files(config: RobotwinConfig) -> None:
    """Raise UserError for assets or files that are missing, and for seeds that are in both splits."""
    asset_root(config)
    if isinstance(config.task_config, str) and is_file(config.task_config) and not Path(config.task_config).is_file():
        raise UserError(f"task_config: there is no file {config.task_config}")
    SeedBook(config.seeds, task_names(config.tasks))
