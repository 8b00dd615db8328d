"""Settings of `tabletop`."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.plugins.envs.tabletop.tasks import TASK_NAMES, TASKS


def _check_names(instance: Any, attribute: Any, names: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in TASK_NAMES]
    if unknown:
        raise ValueError(f"no tabletop task {unknown[0]!r}; tasks: {', '.join(TASK_NAMES)}")
    if len(set(names)) < len(names):
        raise ValueError(f"a task is named twice: {', '.join(names)}")


@frozen(kw_only=True)
class TabletopConfig:
    """Spec keys of the simulator `tabletop`."""

    image_size: int = field(default=64, validator=[validators.ge(16), validators.le(1024)])
    """Height and width of both cameras in pixels, 16 to 1024."""
    tasks: tuple[str, ...] = field(default=(), validator=_check_names)
    """Tasks to offer, by name (`pick_red`, `put_blue`, ...); empty: all eight."""
    max_steps: int = field(default=16, validator=[validators.ge(1), validators.le(10_000_000)])
    """Step limit of every task, 1 to 10,000,000 environment steps."""


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
