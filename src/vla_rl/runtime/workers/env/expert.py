"""The scripted expert of a lane in training: it labels what the policy visits, and acts in its place with the
probability that a ticket tells (DAgger, Ross et al. 2011, arXiv:1011.0686)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from vla_rl.core.randomness import generator
from vla_rl.core.types import ActionSource, Array, ChunkResult, EnvInfo, to_numpy
from vla_rl.runtime.messages.requests import EnvError, EpisodeRequest

LABELS = "expert_actions"
"""Field of the labels in trajectory records."""


@frozen(kw_only=True, eq=False)
class ExpertStep:
    """What the expert says about one chunk step of N envs."""

    labels: Array
    """The expert's chunks, float32 [N, C, A]; 0 in envs that run nothing."""
    acts: Array
    """Envs in which the expert acts, bool [N]."""
    low: Array
    high: Array
    """Bounds of the actions, float32 [A] each."""

    def mix_actions(self, chosen: Array) -> Array:
        """Return the policy's actions, float32 [N, C, A], or the expert's where it acts."""
        return np.where(self.acts[:, None, None], np.clip(self.labels, self.low, self.high), chosen)

    def mark_source(self, result: ChunkResult, actions: Array) -> ChunkResult:
        """Return the result of actions float32 [N, C, A], with the expert as source where it acts and no person did."""
        executed = to_numpy(result.executed)
        by_expert = self.acts[:, None] & executed
        if result.source is None:
            source = np.where(by_expert, np.int8(ActionSource.EXPERT), np.int8(ActionSource.POLICY))
            return evolve(result, source=source, executed_actions=actions[:, : executed.shape[1]])
        source = to_numpy(result.source)
        replaced = by_expert & (source == ActionSource.POLICY)
        return evolve(result, source=np.where(replaced, np.int8(ActionSource.EXPERT), source))


class LaneExpert:
    """The expert of a lane of N envs."""

    def __init__(
        self, ask: Callable[[], Any], *, name: str, info: EnvInfo, num_envs: int, chunk: int, seed: int
    ) -> None:
        """Create the expert of a lane.

        Args:
            ask: returns the simulator's `expert_chunk`, float32 [N, C, A].
            name: name of the simulator, for errors.
        """
        self._ask = ask
        self._name = name
        self._shape = (num_envs, chunk, info.action_dim)
        self._low = np.asarray(info.action_low, np.float32)
        self._high = np.asarray(info.action_high, np.float32)
        self._seed = seed

    def advise_envs(self, env_ids: Array, requests: Sequence[EpisodeRequest], chunks: Array) -> ExpertStep:
        """Return labels for envs in their present state, and where the expert acts. Raises EnvError for wrong chunks.

        Args:
            env_ids: envs that run a ticket, int64 [R].
            requests: requests of their episodes.
            chunks: their chunk steps so far in the episode, int64 [R].
        """
        answer = self._check_answer(self._ask(), env_ids)
        labels = np.zeros(self._shape, np.float32)
        labels[env_ids] = answer[env_ids]
        acts = np.zeros(self._shape[0], bool)
        acts[env_ids] = [
            self._is_acting(request, chunk) for request, chunk in zip(requests, chunks.tolist(), strict=True)
        ]
        return ExpertStep(labels=labels, acts=acts, low=self._low, high=self._high)

    def _is_acting(self, request: EpisodeRequest, chunk: int) -> bool:
        share = request.expert_share
        if share in (0.0, 1.0):
            return share == 1.0
        draws = generator(self._seed, "expert-acts", request.random_key, request.episode, chunk)
        return bool(draws.random() < share)

    def _check_answer(self, answer: Any, env_ids: Array) -> Array:
        labels = np.asarray(to_numpy(answer), np.float32)
        if labels.shape != self._shape:
            raise EnvError(
                f"env {self._name!r}: expert_chunk has shape {labels.shape}, expected {self._shape} (envs, chunk, "
                f"numbers of an action)"
            )
        if not np.isfinite(labels[env_ids]).all():
            raise EnvError(f"env {self._name!r}: expert_chunk returned actions that are not finite")
        return labels
