"""Trajectories of running tickets: the record of each chunk step, and the episodes that ended."""

from __future__ import annotations

import numpy as np

from vla_rl.core.types import Array, Episode
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest

ACTIONS = "actions"
"""Field of the executed actions; kept for persistent streams, and not part of a trajectory."""


class RunningTrajectories:
    """Trajectories of the running tickets of N envs.

    A chunk step is one row of an array for each field, and holds all envs. So a chunk step costs as many copies as
    there are fields, whatever N is, and the record of an env's ticket is a slice of rows in its column.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.clear()

    def clear(self) -> None:
        """Drop all trajectories."""
        self._rows: dict[str, Array] = {}
        """Field -> array [capacity, N, ...]; its first `_count` rows are in use."""
        self._count = 0
        self._first = np.zeros(self.num_envs, np.int64)
        """Row of the first chunk step of each env's ticket."""
        self._episode_first = np.zeros(self.num_envs, np.int64)
        """Row at which the running episode of each env's ticket began, or was continued."""
        self._runs = np.zeros(self.num_envs, bool)
        """Envs that run a ticket."""
        self.episodes: list[list[Episode]] = [[] for _ in range(self.num_envs)]
        """Episodes of the running ticket that ended."""

    def begin_tickets(self, env_ids: Array) -> None:
        self._runs[env_ids] = True
        self._first[env_ids] = self._count
        self._episode_first[env_ids] = self._count
        for env_id in env_ids.tolist():
            self.episodes[env_id] = []

    def begin_episodes(self, env_ids: Array | int) -> None:
        """Note that the next chunk step of these envs is the first one of an episode."""
        self._episode_first[env_ids] = self._count

    def add_chunk(self, record: dict[str, Array]) -> None:
        """Add the record of a chunk step of all envs that run a ticket; arrays are of all envs, [N, ...]."""
        if not self._rows:
            self._rows = {key: np.empty((8, *array.shape), array.dtype) for key, array in record.items()}
        if self._count == len(next(iter(self._rows.values()))):
            self._make_room()
        for key, array in record.items():
            self._rows[key][self._count] = array
        self._count += 1

    def _make_room(self) -> None:
        """Drop the rows before the first running ticket, and double the capacity if most rows are left."""
        start = int(self._first[self._runs].min(initial=self._count))
        count = self._count - start
        for key, rows in self._rows.items():
            grown = rows if count <= len(rows) // 2 else np.empty((2 * len(rows), *rows.shape[1:]), rows.dtype)
            grown[:count] = rows[start : self._count].copy()
            self._rows[key] = grown
        self._count = count
        self._first -= start
        self._episode_first -= start

    def drop_attempt(self, env_id: int) -> int:
        """Drop the chunk steps of the running episode. Return how many of the ticket remain."""
        first = self._first[env_id]
        remaining = int(self._episode_first[env_id] - first)
        start = self._count - remaining
        for rows in self._rows.values():  # so that the ticket's rows stay consecutive
            rows[start : self._count, env_id] = rows[first : first + remaining, env_id].copy()
        self._first[env_id] = start
        self._episode_first[env_id] = self._count
        return remaining

    def ticket_lengths(self, env_ids: Array) -> Array:
        """Return the number of chunk steps of each of these envs' tickets, int64."""
        lengths: Array = self._count - self._first[env_ids]
        return lengths

    def episode_actions(self, env_id: int) -> Array:
        """Return the actions that the ticket executed in its running episode, float32 [T, C, A]."""
        return self._rows[ACTIONS][self._episode_first[env_id] : self._count, env_id].copy()

    def end_ticket(
        self,
        env_id: int,
        request: EpisodeRequest,
        *,
        frames: dict[str, Array] | None,
        cursor: EpisodeRequest | None,
    ) -> EnvTrajectory:
        """Return the trajectory of an env's finished ticket.

        Args:
            request: request of its last episode.
            frames: frames of the last episode that keeps frames.
            cursor: where the ticket's stream continues.
        """
        self._runs[env_id] = False
        first = self._first[env_id]
        return EnvTrajectory(
            number=request.number,
            record={
                key: rows[first : self._count, env_id].copy() for key, rows in self._rows.items() if key != ACTIONS
            },
            episodes=tuple(self.episodes[env_id]),
            frames=frames,
            after=cursor,
            world=request.world,
        )
