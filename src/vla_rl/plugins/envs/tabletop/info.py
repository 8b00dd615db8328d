"""Description of the simulator `tabletop`, without building it."""

from __future__ import annotations

from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.plugins.envs.tabletop.config import TabletopConfig
from vla_rl.plugins.envs.tabletop.tasks import TASKS


def describe_env(config: TabletopConfig) -> EnvInfo:
    """Return the description of the simulator."""
    return EnvInfo(
        cameras={"overhead": (config.image_size,) * 2, "wrist": (config.image_size,) * 2},
        state_dim=4,
        action_low=(-1.0, -1.0, -1.0),
        action_high=(1.0, 1.0, 1.0),
        tasks=tuple(
            TaskInfo(name=task.name, instruction=task.instruction, max_steps=config.max_steps)
            for task in TASKS
            if not config.tasks or task.name in config.tasks
        ),
    )
