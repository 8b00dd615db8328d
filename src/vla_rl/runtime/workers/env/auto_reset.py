"""Persistent env streams (auto_reset): where each stream is within its running episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import define, evolve

from vla_rl.core.types import Array, Observation
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.workers.env.checked import not_deterministic
from vla_rl.runtime.workers.env.episode_records import EpisodeStatistics, StepCounts
from vla_rl.runtime.workers.env.simulator import LaneSimulator


class StreamPositions:
    """Positions of the streams of N envs at the start of their tickets. Empty without auto_reset."""

    def __init__(self, num_envs: int, no_chunks: Array) -> None:
        """Create positions at which no episode has begun. `no_chunks`: actions of no chunk, float32 [0, C, A]."""
        self._no_chunks = no_chunks
        self.earlier_chunks: list[Array] = [no_chunks] * num_envs
        """Chunks of each running episode that were executed before the running ticket, float32 [T, C, A]."""
        self.earlier_return = [0.0] * num_envs
        """Sum of the rewards of those."""
        self._observations: dict[int, tuple[Observation, int]] = {}
        """Env whose last ticket ended in the middle of an episode -> its observation, a row of a batch."""

    def begin_ticket(self, env_id: int, ticket: EpisodeRequest, continues: bool) -> None:
        """Start a ticket. `continues`: the env is where the ticket's stream is."""
        if not continues:
            self.forget_observation(env_id)
        self.earlier_chunks[env_id] = self._no_chunks if ticket.actions is None else ticket.actions
        self.earlier_return[env_id] = ticket.return_so_far

    def begin_episode(self, env_id: int) -> None:
        self.earlier_chunks[env_id] = self._no_chunks
        self.earlier_return[env_id] = 0.0

    def stream_cursor(
        self, env_id: int, request: EpisodeRequest, chunks: Array, return_so_far: float
    ) -> EpisodeRequest:
        """Return where the env's stream continues after its ticket.

        Args:
            request: request of the running episode.
            chunks: chunks that the ticket executed in it, float32 [T, C, A].
            return_so_far: sum of the rewards of the running episode.
        """
        earlier = self.earlier_chunks[env_id]
        actions = np.concatenate([earlier, chunks]) if len(earlier) else chunks
        return evolve(request, actions=actions, return_so_far=return_so_far if len(actions) else 0.0)

    def keep_observations(self, env_ids: Sequence[int], obs: Observation) -> None:
        """Keep the observations that the next tickets of these envs begin with; `obs` is of all envs."""
        if env_ids:
            kept = obs.take(np.array(env_ids))
            self._observations.update({env_id: (kept, row) for row, env_id in enumerate(env_ids)})

    def forget_observation(self, env_id: int) -> None:
        self._observations.pop(env_id, None)

    def forget_all_observations(self) -> None:
        """Forget the observations of all envs, because something else will run on the simulator."""
        self._observations.clear()

    def take_observations(self, env_ids: Array) -> list[tuple[Array, Observation]]:
        """Return those of these envs that continue where they are, with their observations, and forget these. Envs
        whose observations were kept together are returned together."""
        batches: dict[int, tuple[Observation, list[int], list[int]]] = {}
        for env_id in env_ids.tolist() if self._observations else ():
            if env_id in self._observations:
                obs, row = self._observations.pop(env_id)
                _, positions, rows = batches.setdefault(id(obs), (obs, [], []))
                positions.append(env_id)
                rows.append(row)
        return [(np.array(positions), obs.take(np.array(rows))) for obs, positions, rows in batches.values()]


@define(eq=False)
class StreamReplay:
    """Executes the actions of running episodes again, without drawing new ones."""

    simulator: LaneSimulator
    statistics: EpisodeStatistics
    streams: StreamPositions
    counts: StepCounts
    find_broken: Callable[[Array], Array]
    """Active envs, bool [N] -> those that broke since the last call, int64."""
    reset_envs: Callable[[Array], Observation]
    """Resets envs that break meanwhile to the beginning of their episodes."""
    request_of: Callable[[int], EpisodeRequest]
    """Env -> request of its running episode, for errors."""

    def replay_actions(self, env_ids: Array) -> Observation:
        """Execute the actions of these envs' running episodes, after their resets. Return their observations. Raises
        EnvError where an episode ends, or gets other rewards than before."""
        executed_chunks = dict.fromkeys(env_ids.tolist(), 0)
        arrived: dict[int, Observation] = {}
        while remaining := [env_id for env_id in executed_chunks if env_id not in arrived]:
            active = np.zeros(self.simulator.num_envs, bool)
            active[remaining] = True
            actions = self.simulator.no_actions()
            for env_id in remaining:
                actions[env_id] = self.streams.earlier_chunks[env_id][executed_chunks[env_id]]
            remaining_steps = self.statistics.remaining_actions(active)
            result = self.simulator.chunk_step(actions, active, remaining_steps)
            broken = self.find_broken(active)
            _, ends, executed = self.statistics.add_chunk(active, remaining_steps, result, broken)
            self.counts.replayed += executed
            for env_id in set(remaining) - set(broken.tolist()):
                executed_chunks[env_id] += 1
                is_last = executed_chunks[env_id] == len(self.streams.earlier_chunks[env_id])
                self._check_deterministic(env_id, executed_chunks[env_id], bool(ends[env_id]), is_last)
                if is_last:
                    arrived[env_id] = result.obs.take(np.array([env_id]))
            if len(broken):
                self.reset_envs(broken)
                executed_chunks.update(dict.fromkeys(broken.tolist(), 0))
        return Observation.concat([arrived[env_id] for env_id in env_ids.tolist()])

    def _check_deterministic(self, env_id: int, count: int, ended: bool, is_last: bool) -> None:
        """Raise EnvError if the episode differs from its first execution after `count` chunks."""
        rewards = self.statistics.total[env_id]
        expected = self.streams.earlier_return[env_id]
        if ended or (is_last and not np.isclose(rewards, expected)):
            chunks = f"chunk {count} of {len(self.streams.earlier_chunks[env_id])}"
            raise not_deterministic(
                self.simulator.name, self.request_of(env_id), chunks, f"{rewards:g} in all instead of {expected:g}"
            )
