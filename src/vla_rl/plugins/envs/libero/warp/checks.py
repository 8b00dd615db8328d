"""Checks of the settings of `libero_warp` that need no simulator."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.requirements import install_command
from vla_rl.core.spec.structure import at
from vla_rl.plugins.envs.libero.single_env import tasks_of_suites
from vla_rl.plugins.envs.libero.suites import Suite
from vla_rl.plugins.envs.libero.warp.config import LiberoWarpConfig
from vla_rl.plugins.envs.libero.warp.goals import check_goal

logger = logging.getLogger(__name__)

PACKAGES = ("mujoco_warp", "libero")
CPU_IS_FOR_TESTS = (
    "warning: there is no GPU for libero_warp, and on a CPU it is for tests: an action of one world takes 0.2 s, and "
    "the first one minutes, in which kernels are compiled; the simulator libero is faster there"
)


def check_tasks(config: LiberoWarpConfig, context: CheckContext) -> None:
    """Raise UserError for suites and tasks that the installed package does not have, and for tasks whose goal is not
    written for batches. Say that a CPU is for tests."""
    import torch

    for name, chosen in tasks_of_suites(config.official()).items():
        with at("suite" if config.suites is None else "suites"):
            suite = Suite(name)
        with at("tasks") if config.suites is None else at("suites", name):
            for task in suite.select_tasks(chosen):
                check_goal(task)
    if not torch.cuda.is_available():
        logger.warning(CPU_IS_FOR_TESTS)


def check_installation(config: LiberoWarpConfig) -> None:
    """Raise UserError unless the packages are there."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise UserError(
                f"libero_warp needs the package {package!r}; try, in a separate environment that env.python names: "
                f"{install_command(OWN_DIST, 'libero-warp')}"
            )
