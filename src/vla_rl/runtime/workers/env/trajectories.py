"""Trajectories of running tickets: the record of each chunk step, and the episodes that ended."""

from __future__ import annotations

import numpy as np

from vla_rl.core.types import Array, Episode
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest


class RunningTrajectories:
    """Trajectories of the running tickets of N envs."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.episode_start = np.zeros(num_envs, np.int64)
        """Chunk step of the ticket in which its running episode began, or was continued."""
        self.clear()

    def clear(self) -> None:
        """Drop all trajectories."""
        self.records: list[list[dict[str, Array]]] = [[] for _ in range(self.num_envs)]
        """One record for each chunk step of the running ticket; the arrays of a record are of all envs, [N, C]."""
        self.episodes: list[list[Episode]] = [[] for _ in range(self.num_envs)]
        """Episodes of the running ticket that ended."""

    def begin_ticket(self, env_id: int) -> None:
        self.records[env_id] = []
        self.episodes[env_id] = []
        self.episode_start[env_id] = 0

    def begin_episode(self, env_id: int) -> None:
        """Note that the env was reset."""
        self.episode_start[env_id] = len(self.records[env_id])

    def add(self, env_ids: Array, record: dict[str, Array]) -> None:
        """Add the record of a chunk step of these envs."""
        for env_id in env_ids:
            self.records[env_id].append(record)

    def drop_attempt(self, env_id: int) -> int:
        """Drop the chunk steps of the running episode. Return how many of the ticket remain."""
        remaining = int(self.episode_start[env_id])
        del self.records[env_id][remaining:]
        return remaining

    def have_length(self, chunk_steps: int) -> Array:
        """Return which tickets have this many chunk steps, bool [N]."""
        return np.array([len(records) == chunk_steps for records in self.records])

    def lengths(self, env_ids: Array) -> list[int]:
        """Return the number of chunk steps of each of these envs' tickets."""
        return [len(self.records[env_id]) for env_id in env_ids.tolist()]

    def trajectory(
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
        records = self.records[env_id]
        return EnvTrajectory(
            number=request.number,
            record={key: np.stack([record[key][env_id] for record in records]) for key in records[0]},
            episodes=tuple(self.episodes[env_id]),
            frames=frames,
            after=cursor,
            world=request.world,
        )
