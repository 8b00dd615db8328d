"""Memory-mapped files of recorded episodes: each array of an episode has a file, each episode a fixed slot."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.paths import own_copy
from vla_rl.core.types import Array, EnvInfo
from vla_rl.runtime.imagination.interfaces import RecordedEpisode

EPISODE_ARRAYS = ("state", "actions", "executed", "outcomes")
"""Arrays of a `RecordedEpisode` besides its images."""


@frozen(kw_only=True)
class EpisodeShape:
    """Shapes that all episodes of a store have in common."""

    cameras: Mapping[str, tuple[int, int]]
    state_dim: int
    chunk: int
    action_dim: int
    longest: int
    """Number of chunks of the longest episode."""

    @staticmethod
    def of(info: EnvInfo, chunk: int) -> EpisodeShape:
        """Return the shape of a simulator's episodes. Raises UserError for a simulator without cameras."""
        if not info.cameras:
            raise UserError("a world model predicts frames, and this simulator has no cameras; choose another one")
        longest = max(math.ceil(task.max_steps / chunk) for task in info.tasks)
        dims = {"state_dim": info.state_dim, "action_dim": info.action_dim}
        return EpisodeShape(cameras=dict(info.cameras), chunk=chunk, longest=longest, **dims)

    def array_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return name -> (type, shape) of the arrays in a slot."""
        n = self.longest
        return {
            **{f"image-{camera}": ("uint8", (n + 1, *size, 3)) for camera, size in self.cameras.items()},
            "state": ("float32", (n + 1, self.state_dim)),
            "actions": ("float32", (n, self.chunk, self.action_dim)),
            "executed": ("bool", (n, self.chunk)),
            "outcomes": ("int64", (n,)),
        }


class EpisodeFiles:
    """Files of the episodes in one folder: name of an array -> memory-mapped array [slots, ...]."""

    def __init__(self, folder: Path, shape: EpisodeShape, slots: int) -> None:
        """Open the files, or create them. Raises UserError for too small disk or memory, and for other files."""
        self.folder = folder
        self.shape = shape
        self.slots = slots
        folder.mkdir(parents=True, exist_ok=True)
        self._check_room()
        self._arrays = {
            name: self._open_array(name, kind, of) for name, (kind, of) in shape.array_shapes().items() if 0 not in of
        }

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def write_episode(self, slot: int, episode: RecordedEpisode) -> None:
        """Write an episode into a slot. Raises UserError where it has another shape."""
        self._check_shape(episode)
        arrays = _arrays_of(episode)
        for name, array in self._arrays.items():
            array[slot, : len(arrays[name])] = arrays[name]

    def flush(self) -> None:
        """Write all that was recorded to disk."""
        for array in self._arrays.values():
            array.flush()

    def _check_shape(self, episode: RecordedEpisode) -> None:
        length = len(episode.actions)
        problems = [f"{length} chunks"] if not 1 <= length <= self.shape.longest else []
        arrays = _arrays_of(episode)
        for name, (kind, shape) in self.shape.array_shapes().items():
            frames = length + (shape[0] > self.shape.longest)
            expected = f"{kind} {[frames, *shape[1:]]}"
            actual = f"{arrays[name].dtype} {list(arrays[name].shape)}" if name in arrays else "nothing"
            if expected != actual:
                problems.append(f"{name} is {actual}, not {expected}")
        if problems:
            raise UserError(f"an episode does not fit the recorder in {self.folder}: {'; '.join(problems)}")

    def _check_room(self) -> None:
        arrays = self.shape.array_shapes().values()
        needed = self.slots * sum(np.dtype(kind).itemsize * math.prod(shape) for kind, shape in arrays)
        present = sum(file.stat().st_blocks * 512 for file in self.folder.glob("*.bin"))
        disk = shutil.disk_usage(self.folder).free + present
        memory = psutil.virtual_memory().available
        for what, room in (("disk", disk), ("memory", memory)):
            if needed > room:
                raise UserError(
                    f"{self.slots} episodes of up to {self.shape.longest} chunks take {needed / 1e9:.1f} GB, and the "
                    f"{what} of {self.folder} has {room / 1e9:.1f} GB; record fewer episodes, or smaller images"
                )

    def _open_array(self, name: str, kind: str, shape: tuple[int, ...]) -> Any:
        file = self.folder / f"{name}.bin"
        size = self.slots * np.dtype(kind).itemsize * math.prod(shape)
        if file.exists() and file.stat().st_size != size:
            raise UserError(
                f"{file} holds {file.stat().st_size} bytes instead of {size}: it was recorded with other cameras, "
                "chunks or capacities; use another folder"
            )
        own_copy(file)
        with file.open("ab") as opened:
            opened.truncate(size)
        return np.memmap(file, dtype=kind, mode="r+", shape=(self.slots, *shape))


def _arrays_of(episode: RecordedEpisode) -> dict[str, Array]:
    """Return name of a file -> the episode's array."""
    arrays = {f"image-{camera}": frames for camera, frames in episode.images.items()}
    return arrays | {name: getattr(episode, name) for name in EPISODE_ARRAYS}
