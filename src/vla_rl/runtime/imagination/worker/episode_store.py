"""Store of whole recorded episodes and of windows into them, and the index of its slots."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
from attrs import define, field, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.randomness import generator
from vla_rl.core.types import Array, ResetState
from vla_rl.core.world_models import Windows
from vla_rl.runtime.imagination.interfaces import RecordedEpisode
from vla_rl.runtime.imagination.worker.episode_files import EpisodeFiles, EpisodeShape

DESCRIPTION = ("reset_state", "number", "seed", "step", "task", "instruction")
"""Fields that an entry takes from its `RecordedEpisode`."""


@frozen(kw_only=True)
class EpisodeEntry:
    """Index entry of an episode: its slot, and what it is. Checkpoints hold the fields in this order."""

    slot: int
    serial: int
    """Index of the episode among all that were ever recorded."""
    length: int
    """Number of chunks."""
    reset_state: int
    number: int
    seed: int
    step: int
    task: str
    instruction: str


@define(eq=False)
class EpisodeIndex:
    """Index of the newest `capacity` episodes: which slot holds which. It goes into the run's checkpoints. A slot is
    overwritten only when neither the index nor a checkpoint that may still be resumed refers to it."""

    _capacity: int
    _slots: int
    _held_out: float
    """Share of episodes that are used for measuring only, chosen by a hash of their identity."""
    entries: list[EpisodeEntry] = field(factory=list, init=False)
    """Entries, the oldest first."""
    _recorded: int = field(default=0, init=False)
    """Number of episodes that were ever recorded."""
    _checkpointed: list[frozenset[int]] = field(factory=list, init=False)
    """Slots of the checkpoint that would be resumed, and of checkpoints that are being written."""

    def __len__(self) -> int:
        return len(self.entries)

    def free_slot(self) -> int | None:
        """Return a slot for the next episode; None where all slots are in use."""
        remaining = self.entries if len(self.entries) < self._capacity else self.entries[1:]
        used_slots = {entry.slot for entry in remaining}.union(*self._checkpointed)
        return next((slot for slot in range(self._slots) if slot not in used_slots), None)

    def add_episode(self, slot: int, episode: RecordedEpisode) -> None:
        """Add an episode; the oldest beyond the capacity are dropped."""
        description = {name: getattr(episode, name) for name in DESCRIPTION}
        length = len(episode.actions)
        self.entries.append(EpisodeEntry(slot=slot, serial=self._recorded, length=length, **description))
        self._recorded += 1
        del self.entries[: -self._capacity]

    def split_entries(self, held_out: bool) -> list[EpisodeEntry]:
        """Return the entries that are held out, or the entries to train on."""
        return [
            entry for entry in self.entries if is_held_out(entry.reset_state, entry.number, self._held_out) == held_out
        ]

    # ------------------------------------------------------------------------------------------------- resume

    def state(self) -> dict[str, Any]:
        """Return the index as plain data. Its slots are kept until a later one is `saved` or this is `dropped`."""
        self._checkpointed.append(frozenset(entry.slot for entry in self.entries))
        return {"recorded": self._recorded, "entries": [attrs.astuple(entry) for entry in self.entries]}

    def saved(self) -> None:
        """Take note that the checkpoint with the last `state` is written."""
        self._checkpointed = self._checkpointed[-1:]

    def dropped(self) -> None:
        """Take note that the last `state` will not be saved."""
        self._checkpointed.pop()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's index."""
        names = [attribute.name for attribute in attrs.fields(EpisodeEntry)]
        self.entries = [EpisodeEntry(**dict(zip(names, values, strict=True))) for values in state["entries"]]
        self._recorded = state["recorded"]
        self._checkpointed = [frozenset(entry.slot for entry in self.entries)]


def is_held_out(reset_state: int, number: int, share: float) -> bool:
    """Return whether an episode is used for measuring only: the same answer in every run and process."""
    digest = hashlib.sha256(f"{reset_state} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


QUARTERS = (0.1, 0.1, 0.1, 0.7)
"""Probability that a window comes from each quarter of the episodes, the oldest first (DIAMOND)."""


class EpisodeStore:
    """Store of the newest `capacity` episodes. The id of a window packs the serial number of its episode and the index
    of the window's newest frame; it stays valid as long as the episode is in the store."""

    def __init__(self, folder: Path, shape: EpisodeShape, *, capacity: int, spare: int, held_out: float = 0.2) -> None:
        """Open the files in `folder`, or create them.

        Args:
            spare: number of episodes that may be recorded between two checkpoints.
            held_out: share of episodes that are used for measuring only, chosen by a hash of their identity.
        Raises UserError where disk or memory is too small, and for files with other episodes.
        """
        self.folder = folder
        self.shape = shape
        self.index = EpisodeIndex(capacity, capacity + spare, held_out)
        self._spare = spare
        self._files = EpisodeFiles(folder, shape, capacity + spare)

    def add(self, episodes: Iterable[RecordedEpisode]) -> None:
        """Record episodes; the oldest beyond `capacity` are dropped. Raises UserError where an episode has another
        shape, and where checkpoints are too far apart for `spare`."""
        for episode in episodes:
            slot = self.index.free_slot()
            if slot is None:
                raise UserError(
                    f"the recorder in {self.folder} has {self._spare} slots for episodes between two "
                    "checkpoints, and they are used up; save checkpoints more often, or give it more `spare`"
                )
            self._files.write_episode(slot, episode)
            self.index.add_episode(slot, episode)

    def __len__(self) -> int:
        return len(self.index)

    def flush(self) -> None:
        """Write all that was recorded to disk."""
        self._files.flush()

    def start_windows(
        self, where: Literal["any", "first"], *, held_out: bool = False, newest: int | None = None
    ) -> tuple[ResetState, ...]:
        """Return the windows to imagine from: their newest frame is the first of an episode, or ("any") one that a
        chunk followed. They come from the `newest` episodes, or from all."""
        entries = self.index.split_entries(held_out)
        return tuple(
            ResetState(id=self._window_id(entry, frame), task=entry.task)
            for entry in entries[-newest if newest else 0 :]
            for frame in range(entry.length if where == "any" else 1)
        )

    def held_out(self, count: int) -> Array:
        """Return the ids of the first windows of at most `count` held-out episodes, int64, the oldest first: the newest
        ones, half successes and half failures if there are enough, so that failures do not run out."""
        entries = self.index.split_entries(held_out=True)
        success = [self._is_success(entry) for entry in entries]
        successes = [entry for entry, won in zip(entries, success, strict=True) if won]
        failures = [entry for entry, won in zip(entries, success, strict=True) if not won]
        # More than half where there are too few failures.
        wins = min(len(successes), max(count // 2, count - len(failures)))
        chosen = successes[max(len(successes) - wins, 0) :] + failures[max(len(failures) - count + wins, 0) :]
        return np.array(sorted(entry.serial for entry in chosen), np.int64) * self.shape.longest

    def last_windows(self, count: int) -> list[tuple[ResetState, bool]]:
        """Return the first windows of the last `count` episodes, held out or not, and whether each was a success."""
        return [
            (ResetState(id=self._window_id(entry, 0), task=entry.task), self._is_success(entry))
            for entry in self.index.entries[len(self) - count :]
        ]

    def draw(self, count: int, *, history: int, rollout: int, seed: int, number: int) -> Windows:
        """Draw train windows for fitting, newer episodes more often. `number`: number of the draw, which keys it."""
        rng = generator(seed, "world-model/windows", number)
        entries = self.index.split_entries(held_out=False)
        if not entries:
            raise UserError("no episodes have been recorded yet that a world model can be fitted to")
        bounds = [i * len(entries) // 4 for i in range(5)]
        quarters = rng.choice(4, size=count, p=QUARTERS) if len(entries) >= 4 else np.full(count, -1)
        ids = []
        for quarter in quarters:
            low, high = (0, len(entries)) if quarter < 0 else (bounds[quarter], bounds[quarter + 1])
            entry = entries[int(rng.integers(low, high))]
            ids.append(self._window_id(entry, int(rng.integers(entry.length))))
        return self.read_windows(np.array(ids), history=history, rollout=rollout)

    def window_tasks(self, ids: Array) -> list[str]:
        """Return the tasks of these windows' episodes (ids int64 [B])."""
        task_of = {entry.serial: entry.task for entry in self.index.entries}
        return [task_of[serial] for serial in (np.asarray(ids, np.int64) // self.shape.longest).tolist()]

    def read_windows(self, ids: Array, *, history: int, rollout: int = 0) -> Windows:
        """Return the windows with these ids (int64 [B]): `history` frames, and the frames after the `rollout` chunks
        that followed. Raises UserError for an id whose episode is no longer in the store."""
        entry_of = {entry.serial: entry for entry in self.index.entries}
        serials, newest = np.divmod(np.asarray(ids, np.int64), self.shape.longest)
        dropped = [int(serial) for serial in serials if int(serial) not in entry_of]
        if dropped:
            raise UserError(f"episode {dropped[0]} is not in the recorder (any more); ask for `starts` again")
        entries = [entry_of[int(serial)] for serial in serials]
        slots = np.array([entry.slot for entry in entries])[:, None]
        lengths = np.array([entry.length for entry in entries])[:, None]
        frames = newest[:, None] + np.arange(1 - history, rollout + 1)
        chunks = frames[:, :-1]
        # Before the first frame and after the last one, the nearest frame is repeated; chunks there are not executed.
        in_episode = (chunks >= 0) & (chunks < lengths)
        nearest_frames = np.clip(frames, 0, lengths)
        nearest_chunks = np.clip(chunks, 0, lengths - 1)
        state = np.zeros((*nearest_frames.shape, 0), np.float32)
        if self.shape.state_dim:
            state = np.array(self._files["state"][slots, nearest_frames])
        images = {
            camera: np.array(self._files[f"image-{camera}"][slots, nearest_frames]) for camera in self.shape.cameras
        }
        actions = self._files["actions"][slots, nearest_chunks]
        return Windows(
            images=images,
            state=state,
            actions=np.where(in_episode[..., None, None], actions, np.float32(0)),
            executed=np.array(self._files["executed"][slots, nearest_chunks] & in_episode[..., None]),
            outcomes=np.where(in_episode, self._files["outcomes"][slots, nearest_chunks], 0),
            first=frames[:, 0],
            states=np.array([entry.reset_state for entry in entries]),
            seeds=np.array([entry.seed for entry in entries]),
            instructions=tuple(entry.instruction for entry in entries),
        )

    def _window_id(self, entry: EpisodeEntry, frame: int) -> int:
        return entry.serial * self.shape.longest + frame

    def _is_success(self, entry: EpisodeEntry) -> bool:
        """Return whether the episode ended in success: an outcome within the actions of its last chunk."""
        return bool(0 < self._files["outcomes"][entry.slot, entry.length - 1] <= self.shape.chunk)
