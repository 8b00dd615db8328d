"""Checks of the settings of `libero` that need no simulator."""

from __future__ import annotations

import logging
from importlib import metadata

from vla_rl.core.contexts import CheckContext
from vla_rl.core.spec.structure import at
from vla_rl.plugins.envs.libero.config import LiberoConfig
from vla_rl.plugins.envs.libero.plus import SUITES
from vla_rl.plugins.envs.libero.plus.variants import select_variants
from vla_rl.plugins.envs.libero.plus_assets import assets_folder, require_assets
from vla_rl.plugins.envs.libero.plus_files import require_files
from vla_rl.plugins.envs.libero.suites import Suite
from vla_rl.toolkit.envs.rendering import require_mujoco

logger = logging.getLogger(__name__)

CHANGES = {
    (3, 3, 3): "draws the floors of libero_object darker (github.com/Lifelong-Robot-Learning/LIBERO/issues/88)",
    (3, 4, 0): "drops the bowl of libero_spatial's task 5 next to its ramekin, where public checkpoints fail "
    "(github.com/RLinf/RLinf/issues/1460)",
}
"""First version of MuJoCo -> what it changed in LIBERO's scenes, and who says so."""


def check_tasks(config: LiberoConfig, context: CheckContext) -> None:
    """Raise UserError for suites and tasks that the installed package does not have."""
    if config.plus is not None:
        with at("plus"):
            assets, variants = assets_folder(config.plus.assets), select_variants(config.plus)
            require_files(variants)
            require_assets(variants, assets)
            for name in config.plus.suites or SUITES:
                Suite(name)
        return
    with at("suite" if config.suites is None else "suites"):
        chosen = {str(config.suite): config.tasks} if config.suites is None else config.suites
        suites = {name: Suite(name) for name in chosen}
    for name, suite in suites.items():
        with at("tasks") if config.suites is None else at("suites", name):
            suite.select_tasks(chosen[name])


def check_rendering(config: LiberoConfig) -> None:
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
