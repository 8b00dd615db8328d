"""Settings of `robotwin`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import converters, field, frozen
from attrs import validators as v

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.paths import expand_tilde
from vla_rl.plugins.envs.robotwin.tasks import STEP_LIMITS, task_names
from vla_rl.toolkit.envs.settings import Processes

STATE_DIM = 14
"""Number of state dimensions: left arm 6, left gripper, right arm 6, right gripper."""
ACTION_DIMS = {"joints": STATE_DIM, "end_effector": 16}
CAMERAS = {"head": "head_camera", "left_wrist": "left_camera", "right_wrist": "right_camera"}
"""Camera name in specs and observations -> name in the simulator."""
CAMERA_SIZES = {"D435": (240, 320), "Large_D435": (480, 640), "L515": (180, 320), "Large_L515": (360, 640)}
"""Camera type in a task's settings -> height and width in pixels (`_camera_config.yml`)."""


def to_absolute(path: str | Path) -> Path:
    """Return the path as an absolute one. Done when the spec is read, since workers run in other folders."""
    return expand_tilde(path).absolute()


def is_file(name: str) -> bool:
    """Return whether `task_config` names a file rather than one of RoboTwin's own settings."""
    return name.endswith((".yml", ".yaml"))


def task_config(given: Any) -> Any:
    return str(to_absolute(given)) if isinstance(given, str) and is_file(given) else given


def check_tasks(instance: Any, attribute: Any, tasks: str | tuple[str, ...]) -> None:
    names = task_names(tasks)
    if not names:
        raise ValueError(f"name at least one task; tasks: {', '.join(STEP_LIMITS)}")
    for name in names:
        if name not in STEP_LIMITS:
            near = did_you_mean(name, STEP_LIMITS)
            raise ValueError(f"no RoboTwin task {name!r}{near}; tasks: {', '.join(STEP_LIMITS)}")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"named twice: {', '.join(sorted(twice))}")


def known_cameras(instance: Any, attribute: Any, cameras: tuple[str, ...]) -> None:
    if not cameras:
        raise ValueError(f"name at least one camera; cameras: {', '.join(CAMERAS)}")
    for name in cameras:
        if name not in CAMERAS:
            raise ValueError(f"no robotwin camera {name!r}{did_you_mean(name, CAMERAS)}; cameras: {', '.join(CAMERAS)}")
        if cameras.count(name) > 1:
            raise ValueError(f"camera {name!r} is named twice")


def processes_apart(instance: Any, attribute: Any, processes: Processes) -> None:
    if processes.apart is False:
        raise ValueError("apart: false does not work: RoboTwin changes the working directory of an env's process")


@frozen(kw_only=True)
class Seeds:
    """Scenes of the two splits."""

    train: Path | None = field(default=None, converter=converters.optional(to_absolute))
    """File of seeds that work, `{task: {success_seeds: [...]}}`; null: seeds from 200000 on."""
    eval: Path | None = field(default=None, converter=converters.optional(to_absolute))
    """File of seeds for evaluation, in the same form; null: seeds from 100000 on."""
    train_states: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Number of training scenes per task, 1 or more; null: all of the file, or 200."""
    eval_states: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Number of evaluation scenes per task, 1 or more; null: all of the file, or 100."""
    tries: int = field(default=10, validator=[v.ge(1), v.le(100)])
    """Number of seeds that are tried for a scene before the run stops, 1 to 100."""
    check: bool | None = None
    """Take a seed only when RoboTwin's own expert solves it, which takes an episode of planning. Null: with the vector
    API for seeds that are not from a file, with the classic API always (there the expert also tells which objects the
    instruction has to name)."""


@frozen(kw_only=True)
class RobotwinConfig:
    """Spec keys of the simulator `robotwin`."""

    tasks: str | tuple[str, ...] = field(validator=check_tasks)
    """Task name, or a list of names: beat_block_hammer, place_empty_cup, ..."""
    api: Literal["auto", "vector", "classic"] = "auto"
    """API of RoboTwin. `vector`: `VectorEnv` of the runtime wheel or the branch RLinf_support, one thread per env and
    one call per chunk; `classic`: `setup_demo` and `take_action` of main or stable_2.0, envs in processes; `auto`:
    vector if available."""
    checkout: Path | None = field(default=None, converter=converters.optional(to_absolute))
    """Folder of a RoboTwin checkout to import; null: what the interpreter finds, such as the runtime wheel."""
    assets: Path | None = field(default=None, converter=converters.optional(to_absolute))
    """Folder that contains `assets/`; null: ROBOTWIN_ASSETS_ROOT, ASSETS_PATH or `checkout`, whichever is complete."""
    task_config: str | dict[str, Any] = field(default="demo_clean", converter=task_config)
    """RoboTwin's task settings: a name (demo_clean, demo_randomized), a .yml file, or the settings themselves."""
    cameras: tuple[str, ...] = field(default=("head", "left_wrist", "right_wrist"), validator=known_cameras)
    """Cameras, in the order in which a model sees them. `task_config` sets their size: 240 x 320 with its D435."""
    image_height: int | None = field(default=None, validator=v.optional([v.ge(16), v.le(1080)]))
    """Height of images in pixels, 16 to 1080, with the camera's aspect and angle of view; null: the camera's own. Small
    images save a CPU most of a step."""
    render: Literal["ray", "raster"] = "ray"
    """Renderer. `ray`: RoboTwin's ray tracing, which needs an NVIDIA GPU; `raster`: SAPIEN's rasteriser, which also
    runs on a CPU. Images differ, so a policy needs the one that it was trained with."""
    shadows: bool = True
    """Draw shadows. Without them a CPU takes a quarter of the time for an image, and pixels differ."""
    control: Literal["joints", "end_effector"] = "joints"
    """Action. `joints`: 14 joint targets; `end_effector`: 16 numbers, for each arm position [m] and quaternion
    (w, x, y, z) of the hand in the world, and the gripper; a motion is planned to each."""
    seeds: Seeds = field(factory=Seeds)
    """Scenes of training and evaluation, and the treatment of seeds that do not work."""
    instruction_type: Literal["seen", "unseen"] | None = None
    """Set of RoboTwin's wordings of a task from which instructions are taken; null: `eval_instruction` of task_config,
    which is unseen in demo_randomized, else seen."""
    planner: Literal["mplib", "curobo"] | None = None
    """Motion planner of the expert, with the vector API; null: as task_config says, else mplib."""
    processes: Processes = field(default=Processes(apart=True, deadline_s=900.0), validator=processes_apart)
    """Processes of the classic API's env instances; the vector API uses `deadline_s` alone."""

    @property
    def independent_envs(self) -> bool:
        """Whether env instances can step one by one (lanes of single envs): it needs `api: classic`, whose instances
        are in processes."""
        return self.api == "classic"


def action_dim(config: RobotwinConfig) -> int:
    """Return the number of action dimensions."""
    return ACTION_DIMS[config.control]


def camera_sizes(
    cameras: tuple[str, ...], settings: Mapping[str, Any], image_height: int | None
) -> dict[str, tuple[int, int]]:
    """Return camera -> height and width of its images, as the task's settings and `image_height` have them. Raise
    UserError for an unknown camera type."""
    types = settings.get("camera") or {}
    sizes = {}
    for name in cameras:
        kind = types.get("head_camera_type" if name == "head" else "wrist_camera_type", "D435")
        if kind not in CAMERA_SIZES:
            near = did_you_mean(kind, CAMERA_SIZES)
            raise UserError(f"task_config: no camera type {kind!r}{near}\n  types: {', '.join(CAMERA_SIZES)}")
        sizes[name] = scale_size(CAMERA_SIZES[kind], image_height)
    return sizes


def scale_size(size: tuple[int, int], image_height: int | None) -> tuple[int, int]:
    """Return height and width of a camera's images in another height; None: its own."""
    height, width = size
    return size if image_height is None else (image_height, round(image_height * width / height))
