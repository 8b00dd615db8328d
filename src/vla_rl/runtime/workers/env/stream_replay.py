"""Replay of running episodes, so that envs get back to where their streams are (auto_reset)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import define

from vla_rl.core.types import Array, Observation
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.workers.env.auto_reset import StreamPositions
from vla_rl.runtime.workers.env.checked import not_deterministic
from vla_rl.runtime.workers.env.episode_records import EpisodeStatistics, StepCounts
from vla_rl.runtime.workers.env.simulator import LaneSimulator


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
