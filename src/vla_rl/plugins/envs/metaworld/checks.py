"""Checks of the settings of `metaworld` that need no simulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_rl.core.errors import did_you_mean
from vla_rl.plugins.envs.metaworld.tasks import BENCHMARKS, INSTRUCTIONS
from vla_rl.toolkit.envs.rendering import require_mujoco
from vla_rl.toolkit.envs.settings import check_camera_size

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


def known_benchmark(instance: Any, attribute: Any, benchmark: str | None) -> None:
    if benchmark is not None and benchmark not in ("MT1", *BENCHMARKS):
        near = did_you_mean(benchmark, BENCHMARKS)
        raise ValueError(f"no Meta-World benchmark {benchmark!r}{near}\n  benchmarks: MT1, {', '.join(BENCHMARKS)}")


def one_choice_of_tasks(instance: Any, attribute: Any, tasks: tuple[str, ...] | None) -> None:
    benchmark = instance.benchmark
    if benchmark in BENCHMARKS and tasks is not None:
        raise ValueError(f"benchmark {benchmark} names the tasks itself; give either of the two")
    if benchmark == "MT1" and (tasks is None or len(tasks) != 1):
        raise ValueError("MT1 is one task of your choice: give it as tasks: [push-v3]")
    if benchmark is None and not tasks:
        raise ValueError(f"give tasks, such as [push-v3], or a benchmark: {', '.join(BENCHMARKS)}")
    for name in tasks or ():
        if name not in INSTRUCTIONS:
            near = did_you_mean(name, INSTRUCTIONS)
            raise ValueError(f"no Meta-World task {name!r}{near}\n  tasks: {', '.join(INSTRUCTIONS)}")
    if len(set(tasks or ())) < len(tasks or ()):
        raise ValueError(f"a task is named twice: {', '.join(tasks or ())}")


def preflight(config: Any) -> None:
    """Raise UserError unless MuJoCo can draw on this machine."""
    require_mujoco("metaworld")
