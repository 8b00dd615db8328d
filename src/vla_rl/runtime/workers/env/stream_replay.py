"""Replay of running episodes, so that envs get back to where their streams are (auto_reset)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vla_rl.core.types import Array, Observation
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.workers.env.auto_reset import StreamPositions
from vla_rl.runtime.workers.env.checked import not_deterministic
from vla_rl.runtime.workers.env.episode_records import EpisodeStatistics, StepCounts
from vla_rl.runtime.workers.env.fault_recovery import FaultRecovery
from vla_rl.runtime.workers.env.simulator import LaneSimulator


class StreamReplay:
    """Executes the actions of running episodes again, without drawing new ones."""

    def __init__(
        self,
        simulator: LaneSimulator,
        statistics: EpisodeStatistics,
        streams: StreamPositions,
        recovery: FaultRecovery,
        counts: StepCounts,
    ) -> None:
        self.simulator = simulator
        self.statistics = statistics
        self.streams = streams
        self.recovery = recovery
        self.counts = counts

    def replay_actions(
        self,
        env_ids: Array,
        reset: Callable[[Array], Observation],
        request_of: Callable[[int], EpisodeRequest],
    ) -> Observation:
        """Execute the actions of these envs' running episodes, after their resets. Return their observations.

        Args:
            reset: resets envs that break meanwhile to the beginning of their episodes.
            request_of: env -> request of its running episode, for errors.
        Raises EnvError where an episode ends, or gets other rewards than before.
        """
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
            broken = self.recovery.find_broken(active)
            _, ends, executed = self.statistics.add_chunk(active, remaining_steps, result, broken)
            self.counts.replayed += executed
            for env_id in set(remaining) - set(broken.tolist()):
                executed_chunks[env_id] += 1
                is_last = executed_chunks[env_id] == len(self.streams.earlier_chunks[env_id])
                self._check_deterministic(env_id, executed_chunks[env_id], bool(ends[env_id]), is_last, request_of)
                if is_last:
                    arrived[env_id] = result.obs.take(np.array([env_id]))
            if len(broken):
                reset(broken)
                executed_chunks.update(dict.fromkeys(broken.tolist(), 0))
        return Observation.concat([arrived[env_id] for env_id in env_ids.tolist()])

    def _check_deterministic(
        self, env_id: int, count: int, ended: bool, is_last: bool, request_of: Callable[[int], EpisodeRequest]
    ) -> None:
        """Raise EnvError if the episode differs from its first execution after `count` chunks."""
        rewards = self.statistics.total[env_id]
        expected = self.streams.earlier_return[env_id]
        if ended or (is_last and not np.isclose(rewards, expected)):
            chunks = f"chunk {count} of {len(self.streams.earlier_chunks[env_id])}"
            raise not_deterministic(
                self.simulator.name, request_of(env_id), chunks, f"{rewards:g} in all instead of {expected:g}"
            )
