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

    def issue_ticket(self, request: EpisodeRequest) -> EpisodeRequest:
        """Issue a ticket as the next of its env's stream, and return it with where it starts: after the ticket before
        it, after a checkpoint where that is the first since a resume, or at the state of `request` where the stream
        begins."""
        env = request.env_id
        assert env is not None
        previous = self.issued.get(env)
        self.issued[env] = request.number
        if previous is not None:
            return evolve(request, follows=previous)
        cursor = self.consumed.get(env)
        if cursor is None:
            return evolve(request, actions=np.zeros((0, 0, 0), np.float32))
        return request.continued_from(cursor)

    def consume_trajectory(self, trajectory: EnvTrajectory) -> None:
        """Record that a step has trained on this trajectory."""
        cursor = trajectory.after
        if cursor is not None:
            assert cursor.env_id is not None
            self.consumed[cursor.env_id] = cursor

    def save(self, file: Path) -> None:
        """Write the positions of all streams, if any."""
        if not self.consumed:
            return
        envs = sorted(self.consumed)
        cursors = [self.consumed[env] for env in envs]
        empty = np.zeros((0, 0, 0), np.float32)
        actions = [empty if cursor.actions is None else cursor.actions for cursor in cursors]
        shape = max((chunks.shape[1:] for chunks in actions if len(chunks)), default=(0, 0))
        np.savez_compressed(
            file,
            rows=np.array(envs, np.int64),
            states=np.array([cursor.state.id for cursor in cursors], np.int64),
            episodes=np.array([cursor.episode for cursor in cursors], np.int64),
            paid=np.array([cursor.return_so_far for cursor in cursors], np.float64),
            lengths=np.array([len(chunks) for chunks in actions], np.int64),
            actions=np.concatenate([np.zeros((0, *shape), np.float32), *(chunks for chunks in actions if len(chunks))]),
        )

    def load(self, file: Path, states: Mapping[int, ResetState]) -> None:
        """Restore what `save` wrote; do nothing where the run had no streams. A stream whose state is not among
        `states` (reset states by their ids) begins again."""
        if not file.is_file():
            return
        with np.load(file) as arrays:
            ends = np.cumsum(arrays["lengths"])
            actions = np.split(arrays["actions"], ends[:-1]) if len(ends) else []
            columns = [arrays[name].tolist() for name in ("rows", "states", "episodes", "paid")]
            for env, state, episode, return_so_far, chunks in zip(*columns, actions, strict=True):
                if state not in states:  # `env.exclude_states` names it since
                    continue
                self.consumed[env] = EpisodeRequest(
                    state=states[state],
                    number=-1,
                    episode=episode,
                    env_id=env,
                    actions=chunks,
                    return_so_far=return_so_far,
                )
