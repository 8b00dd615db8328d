"""Checks the data set to which the hook `lerobot` appends."""

from __future__ import annotations

from vla_rl.core.contexts import CheckContext
from vla_rl.core.spec.structure import at
from vla_rl.plugins.hooks.lerobot.config import LeRobotHookConfig
from vla_rl.toolkit.data.lerobot import check_folder


def check_data_set(config: LeRobotHookConfig, context: CheckContext) -> None:
    """Raise UserError for a folder that is something else than a data set of this format."""
    if config.folder is not None:
        with at("folder"):
            check_folder(config.folder)
