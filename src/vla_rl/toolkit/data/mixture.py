"""Several data sets as one: samples are numbered through, and pictures have one size."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from PIL import Image

from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, Observation, RecordedRewards, to_numpy

logger = logging.getLogger(__name__)


class MixedDemonstrations(Demonstrations):
    """Data sets one after the other. Their statistics, and the size of their pictures, are those of the first."""

    def __init__(self, parts: Sequence[Demonstrations], names: Sequence[str]) -> None:
        """Read one sample of each data set. `names`: the data sets in words, for messages."""
        self._parts = parts
        self.sizes = [part.num_samples() for part in parts]
        """Number of samples of each data set."""
        self._ends = np.cumsum(self.sizes)
        first, *others = (part.read_samples(np.zeros(1, np.int64))[0] for part in parts)
        self._height_width = {camera: tuple(image.shape[1:3]) for camera, image in first.images.items()}
        for name, obs in zip(names[1:], others, strict=True):
            for camera, image in obs.images.items():
                height, width = self._height_width[camera]
                if tuple(image.shape[1:3]) != (height, width):
                    logger.warning(
                        "%s: pictures of %s are %d x %d and are resized to %d x %d, as those of %s",
                        *(name, camera, *image.shape[1:3], height, width, names[0]),
                    )

    def num_samples(self) -> int:
        return int(self._ends[-1])

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        indices = to_numpy(indices)
        part_of = np.searchsorted(self._ends, indices, side="right")
        rows, observations, actions = [], [], []
        for number in np.unique(part_of):
            chosen = np.flatnonzero(part_of == number)
            start = self._ends[number] - self.sizes[number]
            obs, chunks = self._parts[number].read_samples(indices[chosen] - start)
            rows.append(chosen)
            observations.append(attrs.evolve(obs, images=self._resized(obs.images)))
            actions.append(to_numpy(chunks))
        back = np.argsort(np.concatenate(rows))
        return Observation.concat(observations).take(back), np.concatenate(actions)[back]

    def read_rewards(self, indices: Any, discount: float) -> RecordedRewards:
        indices = to_numpy(indices)
        part_of = np.searchsorted(self._ends, indices, side="right")
        rewards = np.zeros(len(indices), np.float32)
        following = np.full(len(indices), -1, np.int64)
        interventions = np.zeros(len(indices), bool)
        for number in np.unique(part_of):
            chosen = np.flatnonzero(part_of == number)
            start = self._ends[number] - self.sizes[number]
            recorded = self._parts[number].read_rewards(indices[chosen] - start, discount)
            rewards[chosen] = recorded.rewards
            following[chosen] = np.where(recorded.following < 0, -1, recorded.following + start)
            if recorded.interventions is not None:
                interventions[chosen] = recorded.interventions
        return RecordedRewards(rewards=rewards, following=following, interventions=interventions)

    def data_statistics(self) -> Mapping[str, Mapping[str, Sequence[float]]]:
        return self._parts[0].data_statistics()

    def _resized(self, images: Mapping[str, Any]) -> dict[str, Array]:
        return {camera: resize(to_numpy(batch), *self._height_width[camera]) for camera, batch in images.items()}


def resize(pictures: Array, height: int, width: int) -> Array:
    """Return pictures uint8 [B, H, W, 3] in another size, by Lanczos' filter, as OpenVLA's data loader does."""
    if pictures.shape[1:3] == (height, width):
        return pictures
    filtered = (Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS) for picture in pictures)
    return np.stack([np.asarray(picture) for picture in filtered])
