"""Persistent env streams (auto_reset): where each stream is within its running episode."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from vla_rl.core.types import Array, Observation
from vla_rl.runtime.messages.requests import EpisodeRequest


class StreamPositions:
    """Positions of the streams of N envs, each within its running episode. Empty without auto_reset."""

    def __init__(self, num_envs: int) -> None:
        self.chunks: list[list[Array]] = [[] for _ in range(num_envs)]
        """Executed chunks of each running episode, float32 [C, A]."""
        self.earlier_chunks = [0] * num_envs
        """How many of them were executed before the running ticket."""
        self.earlier_return = [0.0] * num_envs
        """Sum of the rewards of those."""
        self._observations: dict[int, Observation] = {}
        """Observations of envs whose last ticket ended in the middle of an episode."""

    def begin_ticket(self, env_id: int, ticket: EpisodeRequest, continues: bool) -> None:
        """Start a ticket. `continues`: the env is where the ticket's stream is."""
        if not continues:
            self.forget_observation(env_id)
        self.chunks[env_id] = [] if ticket.actions is None else list(ticket.actions)
        self.earlier_chunks[env_id] = len(self.chunks[env_id])
        self.earlier_return[env_id] = ticket.return_so_far

    def begin_episode(self, env_id: int) -> None:
        self.chunks[env_id] = []
        self.earlier_chunks[env_id] = 0
        self.earlier_return[env_id] = 0.0

    def drop_attempt(self, env_id: int) -> None:
        """Drop the chunks that the running ticket executed in the running episode."""
        del self.chunks[env_id][self.earlier_chunks[env_id] :]

    def cursor(self, env_id: int, request: EpisodeRequest, empty: Array, return_so_far: float) -> EpisodeRequest:
        """Return where the env's stream continues after its ticket.

        Args:
            request: request of the running episode.
            empty: actions of no chunk, float32 [0, C, A].
            return_so_far: sum of the rewards of the running episode.
        """
        chunks = self.chunks[env_id]
        actions = np.stack(chunks) if chunks else empty
        return evolve(request, actions=actions, return_so_far=return_so_far if chunks else 0.0)

    def keep_observation(self, env_id: int, obs: Observation) -> None:
        """Keep the observation with which the env's next ticket begins; `obs` is of all envs."""
        if self.chunks[env_id]:
            self._observations[env_id] = obs.take(np.array([env_id]))

    def forget_observation(self, env_id: int) -> None:
        self._observations.pop(env_id, None)

    def leave(self) -> None:
        """Forget the observations of all envs, because something else will run on the simulator."""
        self._observations.clear()

    def take_observations(self, env_ids: Array) -> list[tuple[Array, Observation]]:
        """Return those of these envs that continue where they are, each with its observation, and forget these."""
        return [
            (np.array([env_id]), self._observations.pop(env_id))
            for env_id in env_ids.tolist()
            if env_id in self._observations
        ]
