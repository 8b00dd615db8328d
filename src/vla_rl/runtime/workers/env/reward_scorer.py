"""Success and rewards by a reward model, in place of the simulator's own."""

from __future__ import annotations

from threading import Lock
from typing import Any

import numpy as np
from attrs import define, evolve, field

from vla_rl.core.errors import PluginError
from vla_rl.core.reward_models import RewardModel
from vla_rl.core.types import Array, ChunkResult, Observation, to_numpy


@define(eq=False)
class RewardScorer:
    """Rewrites chunk steps' results as `rewards:` says. A model gets one call at a time, also from concurrent lanes."""

    model: RewardModel
    lock: Any = field(factory=Lock)
    """Lock of all scorers that share the model."""
    name: str = field(kw_only=True)
    """Name of the model's plugin, for errors."""
    threshold: float = field(kw_only=True)
    """Probability from which an observation counts as success."""
    judges_success: bool = True
    """Whether the model judges success; False: it only watches, and waits before resets."""

    def before_reset(self, env_ids: Array) -> None:
        """Let the model wait before these envs (int64 [R]) are reset. Raises SafetyStop."""
        with self.lock:
            self.model.before_reset(env_ids)

    def watch_observations(self, obs: Observation | None) -> None:
        """Let the model see the observations of all envs, or, before a chunk, None. Raises SafetyStop."""
        with self.lock:
            self.model.watch(obs)

    def score_chunk(
        self, result: ChunkResult, active: Array, remaining: Array, *, ignore_terminations: bool = False
    ) -> ChunkResult:
        """Return the result of a chunk step with the model's success: reward 1 and a termination at the last valid
        action of the envs that it calls solved, and no other reward. An end by the simulator stays an end. Raises
        PluginError for an answer that is not a probability. Without `judges_success` the result is left as it is.

        Args:
            active: envs that were to execute the chunk, bool [N].
            remaining: actions before each env's step limit, int64 [N].
            ignore_terminations: episodes continue after a termination.
        """
        if not self.judges_success:
            return result
        executed = to_numpy(result.executed).astype(bool)
        terminated = to_numpy(result.terminated).astype(bool)
        truncated = to_numpy(result.truncated).astype(bool)
        count = executed.sum(1)
        stops = truncated if ignore_terminations else terminated | truncated
        first_end = np.where(stops.any(1), stops.argmax(1), executed.shape[1])
        last = np.minimum(np.minimum(first_end, remaining - 1), count - 1)
        env_ids = np.flatnonzero(active & (count > 0))  # an env that broke may have executed nothing
        success = np.zeros(len(active), bool)
        over = np.zeros(len(active), bool)
        if len(env_ids):
            obs = result.obs.take(env_ids)
            ends = stops.any(1) | (count >= remaining)
            with self.lock:
                success[env_ids] = self._success_probability(obs, ends[env_ids]) >= self.threshold
                over[env_ids] = success[env_ids] | self._failed_episodes(obs)
        solved = np.flatnonzero(success)
        ended = np.flatnonzero(over)
        rewards = np.zeros(executed.shape, np.float32)
        rewards[solved, last[solved]] = 1.0
        terminated = terminated.copy()
        terminated[ended, last[ended]] = True
        truncated = truncated.copy()
        # Judged as an end, and not cut off.
        truncated[ended, last[ended]] = False
        return evolve(
            result, rewards=rewards, terminated=terminated, truncated=truncated, success=success, succeeded=None
        )

    def _success_probability(self, obs: Observation, ends: Array) -> Array:
        """Return the model's answers, float32 [R]."""
        probability = np.asarray(to_numpy(self.model.success_probability(obs, ends)), np.float32)
        if probability.shape != ends.shape or not ((probability >= 0) & (probability <= 1)).all():
            raise PluginError(
                f"reward model {self.name!r}: success_probability returned {probability.tolist()!r:.200} for "
                f"{len(ends)} observations; expected one probability from 0 to 1 for each"
            )
        return probability

    def _failed_episodes(self, obs: Observation) -> Array:
        """Return the episodes that the model ends as failures, bool [R]."""
        answer = self.model.failed(obs)
        failed = np.zeros(len(obs), bool) if answer is None else np.asarray(to_numpy(answer))
        if failed.shape != (len(obs),) or failed.dtype != bool:
            raise PluginError(
                f"reward model {self.name!r}: failed returned {failed.tolist()!r:.200} for {len(obs)} observations; "
                "expected True or False for each, or None"
            )
        return failed
