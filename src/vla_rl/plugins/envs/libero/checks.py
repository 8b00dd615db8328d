"""Checks of the settings of `libero` that need no simulator."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from vla_rl.core.spec.structure import at
from vla_rl.core.types import Context
from vla_rl.toolkit.envs.rendering import require_mujoco
from vla_rl.toolkit.envs.settings import check_camera_size

logger = logging.getLogger(__name__)

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

CHANGES = {
    (3, 3, 3): "draws the floors of libero_object darker (github.com/Lifelong-Robot-Learning/LIBERO/issues/88)",
    (3, 4, 0): "drops the bowl of libero_spatial's task 5 beside its ramekin, where public checkpoints fail "
    "(github.com/RLinf/RLinf/issues/1460)",
}
"""First version of MuJoCo -> what it changed in LIBERO's scenes, and who says so."""


def known_cameras(instance: Any, attribute: Any, cameras: Mapping[str, int]) -> None:
    for name, size in cameras.items():
        if name not in CAMERAS:
            raise ValueError(f"no libero camera {name!r}; cameras: {', '.join(CAMERAS)}")
        check_camera_size(name, size)


def one_choice_of_tasks(instance: Any, attribute: Any, suites: Mapping[str, Any] | None) -> None:
    if [instance.suite, suites, instance.plus].count(None) != 2:
        raise ValueError(
            "give one of suite (and tasks), suites, such as {libero_spatial: [0, 3], libero_10: null}, and plus "
            "(LIBERO-Plus), such as {dimensions: [camera], sample: 100}"
        )
    if instance.plus is not None and instance.tasks is not None:
        raise ValueError("tasks belong to suite; plus selects by suites, dimensions and levels")
    if suites is not None and (instance.tasks is not None or not suites):
        raise ValueError("names the tasks of each suite itself; leave tasks out, and name at least one suite")


def state_count(instance: Any, attribute: Any, value: int | str) -> None:
    if isinstance(value, int) and not 1 <= value <= 500:
        raise ValueError(f"{value} states a task; give 1 to 500, or official")


def check(config: Any, context: Context) -> None:
    """Raise UserError for suites and tasks that the installed package does not have."""
    from vla_rl.plugins.envs.libero.suites import Suite

    if config.plus is not None:
        from vla_rl.plugins.envs.libero.plus import SUITES
        from vla_rl.plugins.envs.libero.plus.variants import selected
        from vla_rl.plugins.envs.libero.plus_assets import assets_folder, require_assets
        from vla_rl.plugins.envs.libero.plus_files import require_files

        with at("plus"):
            assets, variants = assets_folder(config.plus.assets), selected(config.plus)
            require_files(variants)
            require_assets(variants, assets)
            for name in config.plus.suites or SUITES:
                Suite(name)
        return
    with at("suite" if config.suites is None else "suites"):
        suites = {name: Suite(name) for name in config.suites or (config.suite,)}
    for name, suite in suites.items():
        with at("tasks") if config.suites is None else at("suites", name):
            suite.select(config.tasks if config.suites is None else config.suites[name])


def preflight(config: Any) -> None:
    """Raise UserError unless MuJoCo can draw here. Warn of a version in which public checkpoints do worse."""
    require_mujoco("libero")
    if text := newer_mujoco(metadata.version("mujoco")):
        logger.warning("warning: %s", text)


def newer_mujoco(version: str) -> str | None:
    """Say what a version of MuJoCo changes against the recorded demonstrations; None: nothing that is known."""
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:3])
    changes = [text for since, text in CHANGES.items() if numbers >= since]
    if not changes:
        return None
    return f"MuJoCo {version} {', and '.join(changes)}; pip install mujoco==3.3.2 to repeat published rates"
