"""What the tests of all models share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from vla_rl.core.randomness import Noise
from vla_rl.core.types import Observation


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
