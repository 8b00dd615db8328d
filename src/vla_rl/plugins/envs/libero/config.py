"""Settings of `libero`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen, validators

from vla_rl.plugins.envs.libero.plus import PlusConfig
from vla_rl.toolkit.envs.settings import SharedProcesses, check_camera_size

CAMERAS = {
    "agentview": "agentview",
    "wrist": "robot0_eye_in_hand",
    "frontview": "frontview",
    "sideview": "sideview",
    "birdview": "birdview",
    "galleryview": "galleryview",
    "robotview": "robot0_robotview",
}
"""Camera name in specs and observations -> name in the simulator."""


def known_cameras(instance: Any, attribute: Any, cameras: Mapping[str, int]) -> None:
    for name, size in cameras.items():
        if name not in CAMERAS:
            raise ValueError(f"no libero camera {name!r}; cameras: {', '.join(CAMERAS)}")
        check_camera_size(name, size)


def one_choice_of_tasks(instance: Any, attribute: Any, suites: Mapping[str, Any] | None) -> None:
    plus = getattr(instance, "plus", None)
    if [instance.suite, suites, plus].count(None) != 2:
        choices = "suite (and tasks), suites, such as {libero_spatial: [0, 3], libero_10: null}"
        if hasattr(instance, "plus"):
            choices += ", and plus (LIBERO-Plus), such as {dimensions: [camera], sample: 100}"
        raise ValueError(f"give one of {choices}")
    if plus is not None and instance.tasks is not None:
        raise ValueError("tasks belong to suite; plus selects by suites, dimensions and levels")
    if suites is not None and (instance.tasks is not None or not suites):
        raise ValueError("names the tasks of each suite itself; leave tasks out, and name at least one suite")


def state_count(instance: Any, attribute: Any, value: int | str) -> None:
    if isinstance(value, int) and not 1 <= value <= 500:
        raise ValueError(f"{value} states a task; give 1 to 500, or official")


@frozen(kw_only=True)
class LiberoTasksConfig:
    """Spec keys that choose LIBERO's tasks, initial states and cameras."""

    suite: str | None = None
    """Task suite: libero_spatial, libero_object, libero_goal, libero_10, libero_90, or another one that the installed
    package has."""
    tasks: tuple[int | str, ...] | None = None
    """Tasks of `suite`, by official number or by name; null: all."""
    suites: dict[str, tuple[int | str, ...] | None] | None = field(default=None, validator=one_choice_of_tasks)
    """Several suites, each with its tasks (null: all), instead of `suite` and `tasks`."""
    cameras: dict[str, int] = field(factory=lambda: {"agentview": 224, "wrist": 224}, validator=known_cameras)
    """Cameras: name -> height and width in pixels (8 to 1024), in the order in which a model sees them."""
    step_limits: Literal["openvla-oft", "simplevla"] = "openvla-oft"
    """Source of the step limits: `openvla-oft` has 220, 280, 300, 520 and 400 actions for the suites spatial, object,
    goal, 10 and 90, `simplevla` has 512 for all. `rollout.max_steps` overrides them."""
    settle_steps: int = field(default=10, validator=[validators.ge(0), validators.le(100)])
    """Number of no-op steps after a reset, 0 to 100, in which objects drop and come to rest; they are not counted as
    steps. 10 as in OpenVLA's evaluation."""
    train_states: int | Literal["official"] = field(default=200, validator=state_count)
    """Number of initial states per task in the train split, 1 to 500, drawn from the task's own placement regions; or
    "official": the 50 evaluation states, on which some published recipes train. results.json then says so."""
    memory_mib: int = field(default=2000, validator=validators.ge(0))
    """Memory in MiB, per process, within which simulators of tasks that no env uses at the moment stay built."""
    disk_mib: int = field(default=8000, validator=validators.ge(0))
    """Disk space in MiB of the compiled models and textures cached in the user's cache folder
    (`~/.cache/vla-rl/libero`); all 130 tasks take about 4,700."""


@frozen(kw_only=True)
class LiberoConfig(LiberoTasksConfig):
    """Spec keys of the simulator `libero`."""

    plus: PlusConfig | None = None
    """Variants of LIBERO-Plus, instead of `suite` or `suites`."""
    fast_render: bool = False
    """Draw simplified meshes without reflections: faster, but pixels differ slightly, so not for reported results."""
    fast_physics: bool = False
    """Solve the physics once per step instead of three times: faster; states differ from the official ones, typically
    by 2e-6, by millimetres where contacts amplify it."""
    processes: SharedProcesses = field(factory=SharedProcesses)
    """Processes of the env instances; those of one process share one simulator per task."""
