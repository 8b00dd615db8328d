"""Transitions of recorded demonstrations, for the part of a batch that comes from them (RLPD)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, EnvInfo, Observation, to_numpy
from vla_rl.toolkit.trainers.demonstrated_actions import check_demonstrated_actions
from vla_rl.toolkit.trainers.replay import TransitionBatch

BLOCK = 64
"""Samples that are read at a time where all are read."""


class DemonstratedTransitions:
    """Transitions of a recording with rewards. A recording ends for the learner where an episode does."""

    def __init__(
        self,
        recording: Demonstrations,
        info: EnvInfo,
        chunk: int,
        discount: float,
        encode: Callable[[Observation], Array] | None = None,
    ) -> None:
        """Read the rewards of a recording. Raises UserError where it has none, or actions of another space.

        Args:
            encode: returns the features [B, D] of observations; given where they never change. Then the whole recording
                is read once, and its frames are not read again.
        """
        self.recording = recording
        self._factor = discount**chunk
        everything = np.arange(recording.num_samples())
        try:
            recorded = recording.read_rewards(everything, discount)
        except UserError as exc:
            raise UserError(
                f"trainer 'off_policy' needs demonstrations with rewards ({exc}); record them with the hook lerobot"
            ) from exc
        self._rewards = recorded.rewards.astype(np.float32)
        self._following = recorded.following
        check_demonstrated_actions(recording, info, chunk)
        self._features: Array | None = None
        if encode is not None:
            features, chunks = [], []
            for part in np.split(everything, everything[BLOCK::BLOCK]):
                obs, actions = recording.read_samples(part)
                features.append(encode(obs.numpy()))
                chunks.append(np.asarray(to_numpy(actions), np.float32))
            self._features = np.concatenate(features)
            self._actions = np.concatenate(chunks)

    def __len__(self) -> int:
        return len(self._rewards)

    def read_batch(self, indices: Array) -> TransitionBatch:
        """Return these samples, int64 [B], as transitions."""
        follows = self._following[indices] >= 0
        following = np.where(follows, self._following[indices], indices)
        obs, actions = self._read_samples(indices)
        return TransitionBatch(
            obs=obs,
            following=self._read_samples(following)[0],
            actions=actions,
            rewards=self._rewards[indices],
            bootstrap=np.where(follows, self._factor, 0.0).astype(np.float32),
        )

    def _read_samples(self, indices: Array) -> tuple[Observation | Array, Array]:
        """Return observations or features, and actions float32 [B, C, A], of samples."""
        if self._features is not None:
            return self._features[indices], self._actions[indices]
        obs, actions = self.recording.read_samples(indices)
        return obs.numpy(), np.asarray(to_numpy(actions), np.float32)
