"""Streams: with auto_reset each row's tickets go on where the row's ticket before ended. The driver knows where a
stream stood after each ticket that came back, the policy's worker after each that it has played since."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from attrs import define, evolve, field

from vla_rl.core.types import ResetState
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest


@define
class EnvStreams:
    """The driver's: which ticket follows which, and what a checkpoint keeps."""

    issued: dict[int, int] = field(factory=dict)
    """Row -> its last ticket."""
    consumed: dict[int, EpisodeRequest] = field(factory=dict)
    """Row -> where its stream stood after the last ticket that was trained on."""

    def next(self, start: EpisodeRequest) -> EpisodeRequest:
        """The ticket in its stream. `start`: it, if the stream begins with it."""
        assert start.row is not None
        before, self.issued[start.row] = self.issued.get(start.row), start.number
        if before is not None:
            return evolve(start, follows=before)
        kept = self.consumed.get(start.row)
        if kept is None:
            return evolve(start, actions=np.zeros((0, 0, 0), np.float32))
        return evolve(start, state=kept.state, episode=kept.episode, actions=kept.actions, paid=kept.paid)

    def consume(self, ticket: EnvTrajectory) -> None:
        if ticket.after is not None:
            assert ticket.after.row is not None
            self.consumed[ticket.after.row] = ticket.after

    def save(self, file: Path) -> None:
        """Nothing where there are none."""
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
        """What `save` wrote; nothing where the run was without streams. `states`: by their ids."""
        if not file.is_file():
            return
        with np.load(file) as kept:
            ends = np.cumsum(kept["lengths"])
            parts = np.split(kept["actions"], ends[:-1]) if len(ends) else []
            of_rows = zip(*(kept[name].tolist() for name in ("rows", "states", "episodes", "paid")), parts, strict=True)
            for row, state, episode, paid, actions in of_rows:
                self.consumed[row] = EpisodeRequest(
                    state=states[state], number=-1, episode=episode, row=row, actions=actions, paid=paid
                )
