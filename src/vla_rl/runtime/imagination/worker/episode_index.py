"""Index of the recorded episodes: which slot holds which episode, and which slots may be overwritten.

The index goes into the run's checkpoints; the data stay where they are. A slot is overwritten only when neither the
index nor a checkpoint that may still be resumed refers to it, so a run that was killed finds the episodes of its newest
checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import define, field, frozen

from vla_rl.runtime.imagination.messages import RecordedEpisode

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
    """Index of the newest `capacity` episodes."""

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
        """Return the index as plain data, for a checkpoint. Its slots are kept until a later checkpoint is `saved`, or
        this one is `dropped`."""
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
