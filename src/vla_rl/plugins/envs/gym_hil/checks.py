"""Checks of the settings of `gym_hil` that need no environment instance."""

from __future__ import annotations

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.gym_hil.config import DeviceSettings, GymHilConfig


def check_device_sharing(config: GymHilConfig, context: CheckContext) -> None:
    """Raise UserError for a device that several envs would share."""
    if isinstance(config.person, DeviceSettings) and context.num_envs > 1:
        raise UserError(
            f"person.type: {config.person.type} with {context.num_envs} envs, and a person holds one "
            "robot at a time; give env.num_envs: 1"
        )
