"""Transitions of recorded demonstrations, for the part of a batch that comes from them (RLPD)."""

from __future__ import annotations

import numpy as np

from vla_rl.core.errors import NotOffered, UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array, EnvInfo, to_numpy
from vla_rl.toolkit.trainers.demonstrated_actions import check_demonstrated_actions
from vla_rl.toolkit.trainers.replay import TransitionBatch


class DemonstratedTransitions:
    """Transitions of a recording with rewards. A recording ends for the learner where an episode does."""

    def __init__(self, recording: Demonstrations, info: EnvInfo, chunk: int, discount: float) -> None:
        """Read the rewards of a recording. Raises UserError where it has none, or actions of another space."""
        self.recording = recording
        self._factor = discount**chunk
        everything = np.arange(recording.num_samples())
        try:
            recorded = recording.read_rewards(everything, discount)
        except NotOffered as exc:
            raise UserError(f"trainer 'off_policy' needs demonstrations with rewards ({exc})") from exc
        self._rewards = recorded.rewards.astype(np.float32)
        self._following = recorded.following
        check_demonstrated_actions(recording, info, chunk)

    def __len__(self) -> int:
        return len(self._rewards)

    def read(self, indices: Array) -> TransitionBatch:
        """Return these samples, int64 [B], as transitions."""
        obs, actions = self.recording.read_samples(indices)
        follows = self._following[indices] >= 0
        following, _ = self.recording.read_samples(np.where(follows, self._following[indices], indices))
        return TransitionBatch(
            obs=obs.numpy(),
            following=following.numpy(),
            actions=np.asarray(to_numpy(actions), np.float32),
            rewards=self._rewards[indices],
            bootstrap=np.where(follows, self._factor, 0.0).astype(np.float32),
        )
