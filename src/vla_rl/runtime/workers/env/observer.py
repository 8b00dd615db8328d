"""Interface of observers that see all that the envs of a lane see and do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from vla_rl.core.types import Array, Observation
from vla_rl.runtime.messages.requests import EpisodeRequest


class RolloutObserver(Protocol):
    """Observer of all episodes of a lane; `world_model_recording.py` records them through it."""

    def on_reset(self, env_ids: Array, starts: Sequence[EpisodeRequest], seeds: Array, obs: Observation) -> None:
        """Take note that these envs (int64 [R]) were reset with these seeds (int64 [R]); `obs` has their R
        observations.
        """

    def on_chunk(
        self, env_ids: Array, actions: Array, record: Mapping[str, Array], success: Array, obs: Observation
    ) -> None:
        """Take note that these envs (int64 [R]) executed a chunk.

        Args:
            actions: float32 [N, C, A] of all N envs, as they were asked for.
            record: masks [N, C], as `EpisodeStatistics.add_chunk` returns them.
            success: bool [N]: whether the last action solved the task.
            obs: observations of all envs after the chunk.
        """
