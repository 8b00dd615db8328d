"""What the tests of all models share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from vla_rl.core.catalogue import installed_plugins, load
from vla_rl.core.contexts import ModelContext
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.randomness import Noise
from vla_rl.core.requirements import missing_requirements
from vla_rl.core.spec.spec import make_component
from vla_rl.core.types import EnvInfo, Observation

NAMES = [name for name, offers in installed_plugins("model").items() if any(item.dist == OWN_DIST for item in offers)]
"""Our own models."""
PRESETS = {"openvla": "fast", "openvla_oft": "fast"}
"""Smallest presets of models where that is not `tiny`."""


def smallest(name: str, env: EnvInfo, chunk: int, device: str = "cpu", **keys: Any) -> Any:
    """Return the smallest model of a plugin, with a critic for chunks; skips where packages are missing."""
    plugin = load("model", name)
    missing = missing_requirements(OWN_DIST, plugin.extra)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[{plugin.extra}]'")
    preset = {"preset": PRESETS.get(name, "tiny")} if "preset" in attrs.fields_dict(plugin.config) else {}
    config = make_component("model", name, **preset, **keys).config
    return plugin.build(config, ModelContext(env=env, chunk=chunk, values="chunk", device=device))


def noise(rows: int, seed: int = 0) -> Noise:
    return Noise(seed, "test", range(rows), [0] * rows, [0] * rows)


def changed(obs: Observation) -> list[Observation]:
    """Each with one input that is another: an image each, the state, the instructions."""
    others = [attrs.evolve(obs, images={**obs.images, n: np.zeros_like(image)}) for n, image in obs.images.items()]
    return [*others, attrs.evolve(obs, state=obs.state + 1), attrs.evolve(obs, instructions=obs.instructions[::-1])]


def read_only_and_tensors(obs: Observation) -> tuple[Observation, Observation]:
    """The same, of arrays that must not be written to, and of tensors."""
    tensors = attrs.evolve(
        obs,
        images={name: torch.from_numpy(image.copy()) for name, image in obs.images.items()},
        state=torch.from_numpy(obs.state.copy()),
    )
    for array in (*obs.images.values(), obs.state):
        array.setflags(write=False)
    return obs, tensors


def reloading(given: Any, **changes: Any) -> Callable[[Path], Any]:
    """For `check_model`: the settings of a preset, for what it has saved in a folder."""
    return lambda folder: attrs.evolve(given, preset=None, checkpoint=str(folder), **changes)
