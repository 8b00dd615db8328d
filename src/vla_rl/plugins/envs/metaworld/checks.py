"""Checks of this machine for `metaworld`."""

from __future__ import annotations

from vla_rl.plugins.envs.metaworld.config import MetaWorldConfig
from vla_rl.toolkit.envs.rendering import require_mujoco


def check_rendering(config: MetaWorldConfig) -> None:
    """Raise UserError unless MuJoCo can draw on this machine."""
    require_mujoco("metaworld")
