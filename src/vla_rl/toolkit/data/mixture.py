"""Several data sets as one: samples are numbered through, and images have one size."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from PIL import Image

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, DataProperties, Observation, RecordedRewards, to_numpy
from vla_rl.toolkit.feature_names import check_order

RATE = 0.01
"""Most difference of two equal frame rates (29.97 and 30), as a share."""
logger = logging.getLogger(__name__)


class MixedDemonstrations(Demonstrations):
    """Data sets one after the other. Their statistics, and the size of their images, are those of the first."""

    def __init__(self, parts: Sequence[Demonstrations], names: Sequence[str]) -> None:
        """Read one sample of each data set. `names`: the data sets in words, for messages. Raise UserError for
        different frame rates, and for actions or states in another order."""
        self._parts = parts
        self._properties = _check_alike(parts, names)
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
                        "%s: images of %s are %d x %d and are resized to %d x %d, as those of %s",
                        *(name, camera, *image.shape[1:3], height, width, names[0]),
                    )

    def num_samples(self) -> int:
        return int(self._ends[-1])

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        rows, observations, actions = [], [], []
        for part, chosen, _, of_part in self._split_samples(indices):
            obs, chunks = part.read_samples(of_part)
            rows.append(chosen)
            sizes = self._height_width
            images = {camera: resize_images(to_numpy(batch), *sizes[camera]) for camera, batch in obs.images.items()}
            observations.append(attrs.evolve(obs, images=images))
            actions.append(to_numpy(chunks))
        back = np.argsort(np.concatenate(rows))
        return Observation.concat(observations).take(back), np.concatenate(actions)[back]

    def recorded_actions(self, indices: Any) -> Array | None:
        counts: Array | None = None
        for part, chosen, _, of_part in self._split_samples(indices):
            recorded = part.recorded_actions(of_part)
            if recorded is not None:
                counts = np.full(len(indices), np.iinfo(np.int64).max) if counts is None else counts
                counts[chosen] = recorded
        return counts

    def read_rewards(self, indices: Any, discount: float) -> RecordedRewards:
        rewards = np.zeros(len(indices), np.float32)
        following = np.full(len(indices), -1, np.int64)
        interventions = np.zeros(len(indices), bool)
        for part, chosen, start, of_part in self._split_samples(indices):
            recorded = part.read_rewards(of_part, discount)
            rewards[chosen] = recorded.rewards
            following[chosen] = np.where(recorded.following < 0, -1, recorded.following + start)
            if recorded.interventions is not None:
                interventions[chosen] = recorded.interventions
        return RecordedRewards(rewards=rewards, following=following, interventions=interventions)

    def data_statistics(self) -> Mapping[str, Mapping[str, Sequence[float]]]:
        return self._parts[0].data_statistics()

    def relative_statistics(self, references: Sequence[int | None]) -> Mapping[str, Mapping[str, Sequence[float]]]:
        first, *_ = [part.relative_statistics(references) for part in self._parts]  # each one checks its actions
        return first

    def data_properties(self) -> DataProperties:
        return self._properties

    def _split_samples(self, indices: Any) -> Iterator[tuple[Demonstrations, Array, int, Array]]:
        """Yield each data set that has some of these samples, with their positions in `indices`, its first sample's
        number, and their numbers in it."""
        indices = to_numpy(indices)
        part_of = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(part_of):
            chosen = np.flatnonzero(part_of == number)
            start = int(self._ends[number] - self.sizes[number])
            yield self._parts[number], chosen, start, indices[chosen] - start


def _check_alike(parts: Sequence[Demonstrations], names: Sequence[str]) -> DataProperties:
    """Return the properties of the first set that says any, compared with those of the others. Raise UserError."""
    known = DataProperties()
    source: dict[str, str] = {}
    for part, name in zip(parts, names, strict=True):
        new = part.data_properties()
        if known.fps is not None and new.fps is not None and not math.isclose(known.fps, new.fps, rel_tol=RATE):
            raise UserError(
                f"{source['fps']} has {known.fps:g} actions a second and {name} {new.fps:g}: one policy would learn "
                "two speeds; leave one of them out, or resample it to the rate of the other"
            )
        for feature in ("action", "state"):
            key = f"{feature}_names"
            check_order(feature, source.get(key, ""), getattr(known, key), name, getattr(new, key))
        for number, sign in known.gripper_signs.items():
            if new.gripper_signs.get(number, sign) != sign:
                raise UserError(
                    f"the gripper's command has opposite signs in {source['gripper_signs']} and {name}, by {number!r} "
                    "of their states: one policy would learn to open and to close by the same action; turn the sign in "
                    "one of them, or leave it out"
                )
        for key in ("fps", "action_names", "state_names", "gripper_signs"):
            if not getattr(known, key) and getattr(new, key):
                known = attrs.evolve(known, **{key: getattr(new, key)})
                source[key] = name
    return known


def resize_images(images: Array, height: int, width: int) -> Array:
    """Return images uint8 [B, H, W, 3] in another size, by Lanczos' filter, as OpenVLA's data loader does."""
    if images.shape[1:3] == (height, width):
        return images
    filtered = (Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS) for image in images)
    return np.stack([np.asarray(image) for image in filtered])
