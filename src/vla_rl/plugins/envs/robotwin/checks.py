"""Checks of the settings of `robotwin` that need no simulator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.types import Context
from vla_rl.plugins.envs.robotwin.seeds import SeedBook, absolute
from vla_rl.plugins.envs.robotwin.tasks import STEP_LIMITS, task_names
from vla_rl.toolkit.envs.settings import Processes

STATE_DIM = 14
"""Number of state dimensions: left arm 6, left gripper, right arm 6, right gripper."""
ACTION_DIMS = {"joints": STATE_DIM, "end_effector": 16}
CAMERAS = {"head": "head_camera", "left_wrist": "left_camera", "right_wrist": "right_camera"}
"""Camera name in specs and observations -> name in the simulator."""
CAMERA_SIZES = {"D435": (240, 320), "Large_D435": (480, 640), "L515": (180, 320), "Large_L515": (360, 640)}
"""Camera type in a task's settings -> height and width in pixels (`_camera_config.yml`)."""
ASSET_FOLDERS = ("assets/background_texture", "assets/embodiments/aloha-agilex", "assets/objects")
ASSET_VARIABLES = ("ROBOTWIN_ASSETS_ROOT", "ASSETS_PATH")
DOWNLOAD = (
    "download them (data set TianxingChen/RoboTwin2.0: background_texture.zip, embodiments.zip, objects.zip) with "
    "`robotwin-download-assets --output FOLDER` of the runtime wheel, or `_download_assets.sh` of a checkout, and "
    "name the folder: `assets: FOLDER`, or ROBOTWIN_ASSETS_ROOT; tasks of blocks run with a robot of boxes, which "
    "tools/robotwin_assets.py of a clone of vla-rl writes"
)
WHERE = (
    "`pip install rlinf-robotwin-runtime==0.1.3` in an interpreter of its own, which `env.python` names; or "
    "`checkout: FOLDER`, a clone of github.com/RoboTwin-Platform/RoboTwin"
)


def is_file(name: str) -> bool:
    """Return whether `task_config` names a file rather than one of RoboTwin's own settings."""
    return name.endswith((".yml", ".yaml"))


def task_config(given: Any) -> Any:
    return str(absolute(given)) if isinstance(given, str) and is_file(given) else given


def known_tasks(instance: Any, attribute: Any, tasks: str | tuple[str, ...]) -> None:
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
        sizes[name] = scaled(CAMERA_SIZES[kind], image_height)
    return sizes


def scaled(size: tuple[int, int], image_height: int | None) -> tuple[int, int]:
    """Return height and width of a camera's images in another height; None: its own."""
    height, width = size
    return size if image_height is None else (image_height, round(image_height * width / height))


def asset_root(config: Any) -> Path:
    """Return the folder that contains `assets/`. Raise UserError when none is complete; the message says how to get
    them."""
    folders = {"assets": config.assets}
    if config.assets is None:
        folders = {name: absolute(os.environ[name]) for name in ASSET_VARIABLES if os.environ.get(name)}
        folders |= {"checkout": config.checkout} if config.checkout else {}
    lacking = {}
    for name, root in folders.items():
        missing = [folder for folder in ASSET_FOLDERS if not (root / folder).is_dir()]
        if not missing:
            return Path(root)
        lacking[name] = f"{root} ({name}) lacks {', '.join(missing)}"
    looked = "\n  ".join(lacking.values()) or f"neither `assets` nor {' nor '.join(ASSET_VARIABLES)} is set"
    raise UserError(f"RoboTwin's assets are not there:\n  {looked}\n  {DOWNLOAD}")


def check(config: Any, context: Context) -> None:
    """Raise UserError for files, settings and seeds that are missing, or where there is no RoboTwin."""
    from vla_rl.plugins.envs.robotwin.installation import find_installation

    preflight(config)
    find_installation(config)


def available_apis(checkout: Path | None) -> dict[Literal["vector", "classic"], tuple[str, Path | None]]:
    """Return the available APIs, best first: API -> (package of the tasks, root of the checkout)."""
    package = checkout / "robotwin" if checkout is not None else package_folder("robotwin")
    tasks = checkout / "envs" if checkout is not None else package_folder("envs")
    apis: dict[Literal["vector", "classic"], tuple[str, Path | None]] = {}
    if package is not None and (package / "envs" / "vector_env.py").is_file():
        wheel = (package / "config.py").is_file()
        apis["vector"] = ("robotwin.envs", None) if wheel else ("envs", package.parent)
    if tasks is not None and (tasks / "_base_task.py").is_file():
        apis["classic"] = ("envs", tasks.parent)
    return apis


def package_folder(name: str) -> Path | None:
    """Return the folder of a package, which is not imported; None if there is none."""
    spec = find_spec(name)
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(locations[0]) if locations else None


def lacks() -> str | None:
    """Return what is missing to use the plugin, or None: RoboTwin itself, which no extra installs, since its packages
    conflict with those of the models."""
    return None if available_apis(None) else f"needs RoboTwin: {WHERE}"


def preflight(config: Any) -> None:
    """Raise UserError for assets or files that are missing, and for seeds that are in both splits."""
    asset_root(config)
    if isinstance(config.task_config, str) and is_file(config.task_config) and not Path(config.task_config).is_file():
        raise UserError(f"task_config: there is no file {config.task_config}")
    SeedBook(config.seeds, task_names(config.tasks))
