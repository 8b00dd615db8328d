"""LIBERO-Plus (Fei et al. 2025, arXiv:2510.13626): LIBERO's tasks in 10,030 variants of seven dimensions. Settings
only, light to import; see docs/simulators/libero-plus.md."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen, validators

from vla_rl.core.errors import did_you_mean
from vla_rl.core.paths import expand_tilde

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
DIMENSIONS = {
    "camera": "Camera Viewpoints",
    "robot": "Robot Initial States",
    "language": "Language Instructions",
    "light": "Light Conditions",
    "background": "Background Textures",
    "noise": "Sensor Noise",
    "layout": "Objects Layout",
}
"""Dimension, in the authors' order -> its name in their classification."""
LEVELS = (1, 2, 3, 4, 5)
ASSETS_VARIABLE = "LIBERO_PLUS_ASSETS"
"""Environment variable that names the unpacked assets where the key `assets` does not."""


def _build_value_check(known: Collection[Any], what: str) -> Any:
    def check_values(instance: Any, attribute: Any, values: tuple[Any, ...] | None) -> None:
        if values is None:
            return
        if not values:
            raise ValueError(f"name at least one {what}, or leave the key out for all")
        for value in values:
            if value not in known:
                near = did_you_mean(str(value), [str(name) for name in known])
                raise ValueError(f"LIBERO-Plus has no {what} {value!r}{near}; it has {', '.join(map(str, known))}")
        if len(set(values)) < len(values):
            raise ValueError(f"a {what} is named twice: {', '.join(map(str, values))}")

    return check_values


def _resolve_assets(folder: str | Path | None) -> Path | None:
    """Return the folder of the assets as an absolute path, since workers run in other folders. The spec records that of
    the environment variable, so that results of a run with assets are not taken for those of a run without."""
    named = folder or os.environ.get(ASSETS_VARIABLE)
    return expand_tilde(named).absolute() if named else None


@frozen(kw_only=True)
class PlusConfig:
    """Variants of LIBERO-Plus that are evaluated, one episode each. Training states are those of the base tasks."""

    suites: tuple[str, ...] | None = field(default=None, validator=_build_value_check(SUITES, "suite"))
    """Suites: libero_spatial, libero_object, libero_goal, libero_10; null: all four."""
    dimensions: tuple[str, ...] | None = field(default=None, validator=_build_value_check(DIMENSIONS, "dimension"))
    """Dimensions: camera, robot, language, light, background, noise, layout; null: all. Without `assets`, light,
    background and 829 layouts are left out, and results.json says how many."""
    assets: Path | None = field(default=None, converter=_resolve_assets)
    """Folder of the authors' unpacked assets.zip (data set Sylvest/LIBERO-plus), which light, background and 829
    layouts need; null: the folder that the environment variable LIBERO_PLUS_ASSETS names, if it is set."""
    levels: tuple[int, ...] | None = field(default=None, validator=_build_value_check(LEVELS, "level"))
    """Difficulty levels, 1 to 5; null: all, and the 121 light variants without a level."""
    sample: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    """Number of variants, sampled in proportion to the number of each dimension and level; null: all."""
    sample_seed: int = field(default=0, validator=validators.ge(0))
    """Seed of `sample`, independent of the run's seed. A larger sample of the same seed contains a smaller one, up to
    rounding."""
    robot_states: Literal["official", "perturbed"] = "official"
    """What the dimension `robot` does. `official`: as the authors' code, where LIBERO's initial state then overwrites
    the perturbed joints, so that only the controller's rest posture differs. `perturbed`: the episode starts with the
    perturbed joints."""
    instructions: Literal["task", "official"] = "task"
    """Instruction of variants outside the dimension `language`. `task`: the base task's. `official`: with the words of
    the variant's name behind it, as the authors' code has it (`... on the plate view 0 0 100 0 0 initstate 7`)."""
