"""Settings of `metaworld`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen, validators

from vla_rl.core.errors import did_you_mean
from vla_rl.plugins.envs.metaworld.tasks import BENCHMARKS, INSTRUCTIONS
from vla_rl.toolkit.envs.settings import Processes, check_camera_size

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


@frozen(kw_only=True)
class MetaWorldConfig:
    """Spec keys of the simulator `metaworld`."""

    benchmark: str | None = field(default=None, validator=known_benchmark)
    """Benchmark: MT10, MT25 or MT50, which name their tasks; or MT1 with one of `tasks`."""
    tasks: tuple[str, ...] | None = field(default=None, validator=one_choice_of_tasks)
    """Task names, such as push-v3, instead of a benchmark."""
    cameras: dict[str, int] = field(factory=lambda: {"corner2": 224}, validator=known_cameras)
    """Cameras: name -> height and width in pixels (8 to 1024), in the order in which a model sees them."""
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
