"""Whole episodes in memory-mapped files of fixed size, and windows of them.

An episode lies in a slot. The index, which says what lies where, goes into the run's checkpoints; the data stay where
they are. A slot is written to again only when neither the index nor a checkpoint that may still be resumed names it, so
a run that was killed finds what its newest checkpoint speaks of.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import psutil
from attrs import field, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.randomness import generator
from vla_rl.core.types import Array, EnvInfo, ResetState
from vla_rl.core.world_models import Windows
from vla_rl.runtime.messages.world_model import RecordedEpisode

QUARTERS = (0.1, 0.1, 0.1, 0.7)
"""How often windows come from each quarter of the episodes, the oldest first (DIAMOND)."""


@frozen(kw_only=True)
class Entry:
    """Where an episode lies, and what it is."""

    slot: int
    serial: int
    """Counts the episodes that were ever recorded."""
    length: int
    """Chunks."""
    reset_state: int
    number: int
    seed: int
    step: int
    task: str
    instruction: str


@frozen(kw_only=True)
class EpisodeShape:
    """What all episodes of a recorder have in common."""

    cameras: Mapping[str, tuple[int, int]]
    state_dim: int
    chunk: int
    action_dim: int
    longest: int
    """Chunks of the longest episode."""

    @staticmethod
    def of(info: EnvInfo, chunk: int) -> EpisodeShape:
        """Raises UserError for a simulator without cameras."""
        if not info.cameras:
            raise UserError("a world model predicts frames, and this simulator has no cameras; choose another one")
        longest = max(math.ceil(task.max_steps / chunk) for task in info.tasks)
        dims = {"state_dim": info.state_dim, "action_dim": info.action_dim}
        return EpisodeShape(cameras=dict(info.cameras), chunk=chunk, longest=longest, **dims)

    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (type, shape) of what a slot holds."""
        n = self.longest
        kept: dict[str, tuple[str, tuple[int, ...]]] = {}
        for camera, size in self.cameras.items():
            kept[f"image-{camera}"] = ("uint8", (n + 1, *size, 3))
        kept["state"] = ("float32", (n + 1, self.state_dim))
        kept["actions"] = ("float32", (n, self.chunk, self.action_dim))
        kept["executed"] = ("bool", (n, self.chunk))
        kept["outcomes"] = ("int64", (n,))
        return kept

    @property
    def slot_bytes(self) -> int:
        return sum(np.dtype(kind).itemsize * math.prod(shape) for kind, shape in self.arrays().values())


@attrs.define
class _Kept:
    entries: list[Entry] = field(factory=list)
    """The oldest first."""
    recorded: int = 0


class EpisodeStore:
    """Holds the newest `capacity` episodes."""

    def __init__(self, folder: Path, shape: EpisodeShape, *, capacity: int, spare: int, held_out: float = 0.2) -> None:
        """
        Args:
            spare: episodes that may be recorded between two checkpoints.
            held_out: share of episodes that are for measuring only, chosen by a hash of their identity.
        Raises UserError where disk or memory is too small, and for files of other episodes.
        """
        self.folder, self.shape, self.capacity, self.share = folder, shape, capacity, held_out
        self._slots = capacity + spare
        folder.mkdir(parents=True, exist_ok=True)
        self._check_room()
        self._arrays = {name: self._open(name, kind, of) for name, (kind, of) in shape.arrays().items() if 0 not in of}
        self._kept = _Kept()
        self._named: list[frozenset[int]] = []
        """Slots of the checkpoint that would be resumed, and of those that are being written."""

    def add(self, episodes: Iterable[RecordedEpisode]) -> None:
        """Record episodes; the oldest beyond `capacity` are forgotten. Raises UserError where an episode is of another
        shape, and where checkpoints are too far apart for `spare`."""
        for episode in episodes:
            length = len(episode.actions)
            self._check(episode, length)
            slot = self._free_slot()
            parts = {f"image-{camera}": frames for camera, frames in episode.images.items()}
            parts |= {name: getattr(episode, name) for name in ("state", "actions", "executed", "outcomes")}
            for name, array in self._arrays.items():
                array[slot, : len(parts[name])] = parts[name]
            same = ("reset_state", "number", "seed", "step", "task", "instruction")
            about = {name: getattr(episode, name) for name in same}
            self._kept.entries.append(Entry(slot=slot, serial=self._kept.recorded, length=length, **about))
            self._kept.recorded += 1
            del self._kept.entries[: -self.capacity]

    def __len__(self) -> int:
        return len(self._kept.entries)

    # ------------------------------------------------------------------------------------------------- resume

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the index, plain data. What it names stays until a later checkpoint was `saved`, or this
        one was `dropped`."""
        self._named.append(frozenset(entry.slot for entry in self._kept.entries))
        return {"recorded": self._kept.recorded, "entries": [attrs.astuple(entry) for entry in self._kept.entries]}

    def saved(self) -> None:
        """The checkpoint with the last `state` is in its place."""
        self._named = self._named[-1:]

    def dropped(self) -> None:
        """The last `state` is not saved, and will not be."""
        self._named.pop()

    def flush(self) -> None:
        """Have all that was recorded on disk."""
        for array in self._arrays.values():
            array.flush()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's index."""
        names = [f.name for f in attrs.fields(Entry)]
        entries = [Entry(**dict(zip(names, values, strict=True))) for values in state["entries"]]
        self._kept = _Kept(entries, state["recorded"])
        self._named = [frozenset(entry.slot for entry in entries)]

    # ------------------------------------------------------------------------------------------------ windows

    def starts(
        self, where: Literal["any", "first"], *, held_out: bool = False, newest: int | None = None
    ) -> tuple[ResetState, ...]:
        """Windows to imagine from, the newest frame of which is the first of an episode, or any that a chunk followed;
        of so many of the newest episodes, or of all. Their ids stay the same as long as the episode is there."""
        entries = self._entries(held_out)
        return tuple(
            ResetState(id=entry.serial * self.shape.longest + t, task=entry.task)
            for entry in entries[-newest if newest else 0 :]
            for t in range(entry.length if where == "any" else 1)
        )

    def held_out(self, count: int) -> Array:
        """Ids of the first windows of at most so many held-out episodes, int64, the oldest first: the newest of them,
        half successes and half others where there are as many, so that failures do not run out as a policy learns."""
        entries = self._entries(True)
        won = [self._won(entry) for entry in entries]
        of_each = [[e for e, w in zip(entries, won, strict=True) if w is kind] for kind in (True, False)]
        wins = min(len(of_each[0]), max(count // 2, count - len(of_each[1])))
        chosen = [
            e for kind, n in zip(of_each, (wins, count - wins), strict=True) for e in kind[max(len(kind) - n, 0) :]
        ]
        return np.array(sorted(entry.serial for entry in chosen), np.int64) * self.shape.longest

    def last(self, count: int) -> list[tuple[ResetState, bool]]:
        """First windows of the last so many episodes, held out or not, and whether each was a success."""
        return [
            (
                ResetState(id=entry.serial * self.shape.longest, task=entry.task),
                self._won(entry),
            )
            for entry in self._kept.entries[len(self) - count :]
        ]

    def draw(self, count: int, *, history: int, rollout: int, seed: int, number: int) -> Windows:
        """Train windows to fit on, newer episodes more often; `number`: of the draw, which keys it."""
        chance, entries = generator(seed, "world-model/windows", number), self._entries(False)
        if not entries:
            raise UserError("no episodes have been recorded yet that a world model can be fitted to")
        bounds = [i * len(entries) // 4 for i in range(5)]
        quarters = chance.choice(4, size=count, p=QUARTERS) if len(entries) >= 4 else np.full(count, -1)
        ids = []
        for quarter in quarters:
            low, high = (0, len(entries)) if quarter < 0 else (bounds[quarter], bounds[quarter + 1])
            entry = entries[int(chance.integers(low, high))]
            ids.append(entry.serial * self.shape.longest + int(chance.integers(entry.length)))
        return self.windows(np.array(ids), history=history, rollout=rollout)

    def tasks(self, ids: Array) -> list[str]:
        """Of the episodes of these windows (int64 [B])."""
        known = {entry.serial: entry.task for entry in self._kept.entries}
        return [known[serial] for serial in (np.asarray(ids, np.int64) // self.shape.longest).tolist()]

    def windows(self, ids: Array, *, history: int, rollout: int = 0) -> Windows:
        """Windows of `starts` (int64 [B]): `history` frames, and those after the `rollout` chunks that followed. Raises
        UserError for an id whose episode is no longer there."""
        known = {entry.serial: entry for entry in self._kept.entries}
        serials, newest = np.divmod(np.asarray(ids, np.int64), self.shape.longest)
        gone = [int(s) for s in serials if int(s) not in known]
        if gone:
            raise UserError(f"episode {gone[0]} is not in the recorder (any more); ask for `starts` again")
        entries = [known[int(serial)] for serial in serials]
        slots, lengths = (np.array([getattr(e, name) for e in entries])[:, None] for name in ("slot", "length"))
        frames = newest[:, None] + np.arange(1 - history, rollout + 1)
        chunks = frames[:, :-1]
        there, shown = (chunks >= 0) & (chunks < lengths), np.clip(frames, 0, lengths)
        played = np.clip(chunks, 0, lengths - 1)
        executed = self._arrays["executed"][slots, played] & there[..., None]
        state = self._arrays["state"][slots, shown] if self.shape.state_dim else np.zeros((*shown.shape, 0), np.float32)
        return Windows(
            images={camera: np.array(self._arrays[f"image-{camera}"][slots, shown]) for camera in self.shape.cameras},
            state=np.array(state),
            actions=np.where(there[..., None, None], self._arrays["actions"][slots, played], np.float32(0)),
            executed=np.array(executed),
            outcomes=np.where(there, self._arrays["outcomes"][slots, played], 0),
            first=frames[:, 0],
            states=np.array([entry.reset_state for entry in entries]),
            seeds=np.array([entry.seed for entry in entries]),
            instructions=tuple(entry.instruction for entry in entries),
        )

    # ------------------------------------------------------------------------------------------------- inside

    def _entries(self, held_out: bool) -> list[Entry]:
        return [e for e in self._kept.entries if is_held_out(e.reset_state, e.number, self.share) == held_out]

    def _won(self, entry: Entry) -> bool:
        return bool(0 < self._arrays["outcomes"][entry.slot, entry.length - 1] <= self.shape.chunk)

    def _free_slot(self) -> int:
        kept = self._kept.entries if len(self._kept.entries) < self.capacity else self._kept.entries[1:]
        taken = {entry.slot for entry in kept}.union(*self._named)
        free = next((slot for slot in range(self._slots) if slot not in taken), None)
        if free is None:
            raise UserError(
                f"the recorder in {self.folder} has {self._slots - self.capacity} slots for episodes between two "
                "checkpoints, and they are used up; save checkpoints more often, or give it more `spare`"
            )
        return free

    def _check(self, episode: RecordedEpisode, length: int) -> None:
        wrong = [f"{length} chunks"] if not 1 <= length <= self.shape.longest else []
        found = {f"image-{camera}": frames for camera, frames in episode.images.items()}
        found |= {name: getattr(episode, name) for name in ("state", "actions", "executed", "outcomes")}
        for name, (kind, shape) in self.shape.arrays().items():
            frames = length + (shape[0] > self.shape.longest)
            want, got = f"{kind} {[frames, *shape[1:]]}", "nothing"
            if name in found:
                got = f"{found[name].dtype} {list(found[name].shape)}"
            if want != got:
                wrong.append(f"{name} is {got}, not {want}")
        if wrong:
            raise UserError(f"an episode does not fit the recorder in {self.folder}: {'; '.join(wrong)}")

    def _check_room(self) -> None:
        needed = self._slots * self.shape.slot_bytes
        there = sum(file.stat().st_blocks * 512 for file in self.folder.glob("*.bin"))
        disk, memory = shutil.disk_usage(self.folder).free + there, psutil.virtual_memory().available
        for what, room in (("disk", disk), ("memory", memory)):
            if needed > room:
                raise UserError(
                    f"{self._slots} episodes of up to {self.shape.longest} chunks take {needed / 1e9:.1f} GB, and the "
                    f"{what} of {self.folder} has {room / 1e9:.1f} GB; record fewer episodes, or smaller images"
                )

    def _open(self, name: str, kind: str, shape: tuple[int, ...]) -> Any:
        file, size = self.folder / f"{name}.bin", self._slots * np.dtype(kind).itemsize * math.prod(shape)
        if file.exists() and file.stat().st_size != size:
            raise UserError(
                f"{file} holds {file.stat().st_size} bytes instead of {size}: it was recorded with other cameras, "
                "chunks or capacities; use another folder"
            )
        with file.open("ab") as opened:
            opened.truncate(size)
        return np.memmap(file, dtype=kind, mode="r+", shape=(self._slots, *shape))


def is_held_out(reset_state: int, number: int, share: float) -> bool:
    """Whether an episode is for measuring only: the same answer in every run and process."""
    digest = hashlib.sha256(f"{reset_state} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
