"""The simulator of a lane, whose calls are checked and timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np
from attrs import evolve

from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.types import ActionSource, Array, ChunkResult, EnvInfo, Observation, to_numpy
from vla_rl.runtime.workers.env.checked import checked_actions, checked_observation, checked_result
from vla_rl.runtime.workers.env.episode_records import StepCounts
from vla_rl.runtime.workers.env.one_by_one import one_by_one
from vla_rl.runtime.workers.env.recording import EpisodeRecorder
from vla_rl.runtime.workers.env.reward_scorer import RewardScorer


class LaneSimulator:
    """The simulator of a lane of N envs. Seconds of its calls are added to `counts`."""

    def __init__(
        self,
        env: SimEnv,
        *,
        name: str,
        chunk: int,
        stop_at_end: bool,
        recorder: EpisodeRecorder,
        counts: StepCounts,
        scorer: RewardScorer | None = None,
        ignore_terminations: bool = False,
    ) -> None:
        """Wrap a simulator.

        Args:
            name: name of the simulator, for errors.
            stop_at_end: whether the rest of a chunk is dropped after an end.
            recorder: recorder that may ask for the observation after every action.
            scorer: teller of success and rewards; None: the simulator.
            ignore_terminations: episodes continue after a termination.
        """
        self.env = env
        self.name = name
        self.chunk = chunk
        self.stop_at_end = stop_at_end
        self.recorder = recorder
        self.counts = counts
        self.scorer = scorer
        self.ignore_terminations = ignore_terminations
        self.num_envs = env.num_envs
        self.low = np.asarray(env.info.action_low, np.float32)
        self.high = np.asarray(env.info.action_high, np.float32)
        self._faults: Mapping[int, Sequence[str]] = {}
        """Faults of the last chunk that `env.faults` no longer reports."""

    @property
    def info(self) -> EnvInfo:
        return self.env.info

    def no_actions(self) -> Array:
        """Return a chunk of zeros for each env, float32 [N, C, A]."""
        return np.zeros((self.num_envs, self.chunk, len(self.low)), np.float32)

    def all_actions(self, actions: Array, env_ids: Array) -> Array:
        """Return the actions of these envs, as [N, C, A] with zeros for the others. Raises EnvError."""
        of_all = self.no_actions()
        of_all[env_ids] = checked_actions(self.name, self.info, actions, env_ids, self.chunk)
        return of_all

    def reset_envs(self, env_ids: Array, state_ids: Array, seeds: Array) -> Observation:
        """Reset envs; arrays are int64 [R]. Return their observations. Raises EnvError."""
        if self.scorer is not None:
            self.scorer.before_reset(env_ids)
        before = perf_counter()
        obs = self.env.reset(env_ids, state_ids, seeds)
        self.counts.seconds += perf_counter() - before
        return checked_observation(self.name, self.info, obs, len(env_ids), "reset")

    def chunk_step(self, actions: Array, active: Array, remaining: Array) -> ChunkResult:
        """Execute actions float32 [N, C', A] in the active envs, bool [N], with `remaining` actions before their step
        limits, int64 [N]. Raises EnvError.
        """
        watches = self.scorer is not None and self.scorer.watches_actions and not self.info.chunk_is_one_motion
        if self.scorer is not None:
            self.scorer.watch_observations(None)
        before = perf_counter()
        if watches or self.recorder.wants_steps(active):
            observers = [self.recorder.add_observations] if self.recorder.wants_steps(active) else []
            if watches:
                observers.append(self._show_to_scorer)
            result, faults = one_by_one(self.env, actions, active, self.stop_at_end, observers)
            self._faults = faults
        else:
            result = self.env.chunk_step(actions, active.copy(), self.stop_at_end)
        self.counts.seconds += perf_counter() - before
        result = checked_result(self.name, self.info, result, self.num_envs, actions.shape[1])
        if self.scorer is not None:
            result = self.scorer.score_chunk(result, active, remaining, ignore_terminations=self.ignore_terminations)
        return result if result.source is None else _with_own_actions(result, actions)

    def _show_to_scorer(self, env_ids: Array, obs: Observation) -> None:
        assert self.scorer is not None
        self.scorer.watch_observations(obs)

    @property
    def is_deterministic(self) -> bool:
        """Return whether the same actions from the same reset give the same episode."""
        return self.info.deterministic and (self.scorer is None or self.scorer.is_deterministic)

    def take_faults(self) -> dict[int, Sequence[str]]:
        """Return the envs that broke since the last call, with the texts of their faults."""
        faults = {**self._faults, **self.env.faults()}
        self._faults = {}
        return faults


def _with_own_actions(result: ChunkResult, actions: Array) -> ChunkResult:
    """Return the result with the policy's actions (float32 [N, C, A]) wherever no other source chose an executed
    one."""
    executed = to_numpy(result.executed)
    source = np.where(executed, to_numpy(result.source), np.int8(ActionSource.POLICY))
    others = (source != ActionSource.POLICY)[..., None]
    return evolve(result, source=source, executed_actions=np.where(others, to_numpy(result.executed_actions), actions))
