"""Settings of `metaworld`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen, validators

from vla_rl.core.errors import did_you_mean
from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.plugins.envs.metaworld.tasks import BENCHMARKS, CORNER2_POSITION, INSTRUCTIONS
from vla_rl.toolkit.envs.rendering import require_mujoco
from vla_rl.toolkit.envs.settings import Processes, check_camera_size

ACTION_DIM, STATE_DIM = 4, 4
CAMERAS = {
    "corner": True,
    "corner2": True,
    "corner3": True,
    "corner4": True,
    "topview": False,
    "behindGripper": False,
    "gripperPOV": False,
}
"""Camera of the model -> whether it hangs upside down, so that its images are rotated by 180 degrees."""


def known_cameras(instance: Any, attribute: Any, cameras: Mapping[str, int]) -> None:
    if not cameras:
        raise ValueError(f"name at least one camera, such as {{corner2: 224}}; cameras: {', '.join(CAMERAS)}")
    for name, size in cameras.items():
        if name not in CAMERAS:
            raise ValueError(
                f"no metaworld camera {name!r}{did_you_mean(name, CAMERAS)}\n  cameras: {', '.join(CAMERAS)}"
            )
        check_camera_size(name, size)


def check_tasks(instance: Any, attribute: Any, tasks: str | tuple[str, ...]) -> None:
    if isinstance(tasks, str) and tasks not in BENCHMARKS:
        near = did_you_mean(tasks, BENCHMARKS)
        raise ValueError(f"no Meta-World benchmark {tasks!r}{near}; give {', '.join(BENCHMARKS)}, or [push-v3, ...]")
    if not tasks:
        raise ValueError(f"give tasks, such as [push-v3], or a benchmark: {', '.join(BENCHMARKS)}")
    for name in () if isinstance(tasks, str) else tasks:
        if name not in INSTRUCTIONS:
            near = did_you_mean(name, INSTRUCTIONS)
            raise ValueError(f"no Meta-World task {name!r}{near}\n  tasks: {', '.join(INSTRUCTIONS)}")
    if not isinstance(tasks, str) and len(set(tasks)) < len(tasks):
        raise ValueError(f"a task is named twice: {', '.join(tasks)}")


@frozen(kw_only=True)
class MetaWorldConfig:
    """Spec keys of the simulator `metaworld`."""

    tasks: str | tuple[str, ...] = field(validator=check_tasks)
    """Tasks: names, such as [push-v3] (one is MT1), or a benchmark that names them: MT10, MT25 or MT50."""
    cameras: dict[str, int] = field(factory=lambda: {"corner2": 224}, validator=known_cameras)
    """Cameras: name -> height and width in pixels (8 to 1024), in the order in which a model sees them."""
    corner2_position: tuple[float, float, float] = CORNER2_POSITION
    """Position of the camera `corner2` [m]: x, y, z; lerobot's and RLinf's. Meta-World's own is [1.3, -0.2, 1.1]."""
    settle_steps: int = field(default=0, validator=[validators.ge(0), validators.le(100)])
    """Number of zero actions after a reset, 0 to 100, which are not counted as steps; 0 as in lerobot's evaluation."""
    fast_render: bool = False
    """Leave out shadows, reflections and multisampling: about ten times as fast, with other pixels."""
    reward: Literal["sparse", "dense"] = "sparse"
    """Reward. `sparse`: 1 at an action after which the task is solved, else 0. `dense`: Meta-World's own, 0 to 10 per
    action."""
    max_steps: int = field(default=500, validator=[validators.ge(1), validators.le(10_000_000)])
    """Step limit of every task, 1 to 10,000,000 actions; 500 as in the benchmarks."""
    train_states: int = field(default=200, validator=[validators.ge(1), validators.le(9000)])
    """Number of initial states per task in the train split, 1 to 9000."""
    keep_tasks: int = field(default=4, validator=validators.ge(1))
    """Number of tasks whose simulators an env instance keeps built, 1 or more: about 70 MB each with `fast_render`, 140
    MB without. Others are built again when needed, in half a second."""
    processes: Processes = field(factory=Processes)
    """Processes of the env instances."""

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the tasks, those of a benchmark in its order."""
        return BENCHMARKS[self.tasks] if isinstance(self.tasks, str) else self.tasks


def describe_env(config: MetaWorldConfig) -> EnvInfo:
    """Return the description of the simulator."""
    names = config.task_names
    notes = []
    if config.fast_render:
        notes.append(
            "fast_render: no shadows, reflections or multisampling, so other pixels than the official simulator's"
        )
    if "corner2" in config.cameras and config.corner2_position != CORNER2_POSITION:
        x, y, z = config.corner2_position
        notes.append(f"corner2 stands at {x:g} {y:g} {z:g}: public checkpoints and data sets saw other images")
    return EnvInfo(
        cameras={name: (size, size) for name, size in config.cameras.items()},
        state_dim=STATE_DIM,
        action_low=(-1.0,) * ACTION_DIM,
        action_high=(1.0,) * ACTION_DIM,
        tasks=tuple(TaskInfo(name=n, instruction=INSTRUCTIONS[n], max_steps=config.max_steps) for n in names),
        notes=tuple(notes),
    )


def check_rendering(config: MetaWorldConfig) -> None:
    """Raise UserError unless MuJoCo can draw on this machine."""
    require_mujoco("metaworld")
