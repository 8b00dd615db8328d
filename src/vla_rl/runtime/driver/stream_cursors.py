"""Persistent env streams (auto_reset), as the driver knows them: each ticket of an env continues where its previous
ticket ended.

The driver knows the position of a stream after each ticket that came back; the policy's worker knows it after each
ticket that it has finished since.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from attrs import define, evolve, field

from vla_rl.core.types import ResetState
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest


@define
class EnvStreams:
    """Streams of the driver: which ticket follows which, and what a checkpoint stores."""

    issued: dict[int, int] = field(factory=dict)
    """Env -> its last ticket."""
    consumed: dict[int, EpisodeRequest] = field(factory=dict)
    """Env -> position of its stream after the last ticket that was trained on."""

    def next(self, start: EpisodeRequest) -> EpisodeRequest:
        """Return the ticket as the next one of its stream. `start`: the ticket, as if the stream began with it."""
        assert start.env_id is not None
        before, self.issued[start.env_id] = self.issued.get(start.env_id), start.number
        if before is not None:
            return evolve(start, follows=before)
        kept = self.consumed.get(start.env_id)
        if kept is None:
            return evolve(start, actions=np.zeros((0, 0, 0), np.float32))
        return evolve(start, state=kept.state, episode=kept.episode, actions=kept.actions, paid=kept.paid)

    def consume(self, ticket: EnvTrajectory) -> None:
        if ticket.after is not None:
            assert ticket.after.env_id is not None
            self.consumed[ticket.after.env_id] = ticket.after

    def save(self, file: Path) -> None:
        """Write the positions of all streams; nothing where there are none."""
        if not self.consumed:
            return
        rows = sorted(self.consumed)
        kept = [self.consumed[row] for row in rows]
        actions = [np.zeros((0, 0, 0), np.float32) if after.actions is None else after.actions for after in kept]
        shape = max((part.shape[1:] for part in actions if len(part)), default=(0, 0))
        np.savez_compressed(
            file,
            rows=np.array(rows, np.int64),
            states=np.array([after.state.id for after in kept], np.int64),
            episodes=np.array([after.episode for after in kept], np.int64),
            paid=np.array([after.paid for after in kept], np.float64),
            lengths=np.array([len(part) for part in actions], np.int64),
            actions=np.concatenate([np.zeros((0, *shape), np.float32), *(p for p in actions if len(p))]),
        )

    def load(self, file: Path, states: Mapping[int, ResetState]) -> None:
        """Restore what `save` wrote; do nothing where the run had no streams. `states`: reset states by their ids."""
        if not file.is_file():
            return
        with np.load(file) as kept:
            ends = np.cumsum(kept["lengths"])
            parts = np.split(kept["actions"], ends[:-1]) if len(ends) else []
            of_rows = zip(*(kept[name].tolist() for name in ("rows", "states", "episodes", "paid")), parts, strict=True)
            for row, state, episode, paid, actions in of_rows:
                self.consumed[row] = EpisodeRequest(
                    state=states[state], number=-1, episode=episode, env_id=row, actions=actions, paid=paid
                )
