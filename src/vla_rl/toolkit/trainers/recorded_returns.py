"""Rewards and returns of recordings, for trainers that learn from them."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import Array
from vla_rl.toolkit.trainers.demonstrated_actions import refuse_masked_actions


@frozen(eq=False)
class RecordedReturns:
    """What followed each of n samples of a recording. Rewards are scaled so that returns span a range of 1."""

    recording: Demonstrations
    rewards: Array
    """float32 [n]: discounted rewards until the next sample."""
    following: Array
    """int64 [n]: index of the next sample, or -1."""
    returns: Array
    """float32 [n]: discounted rewards until the end of the episode."""
    interventions: Array
    """bool [n]: a person or an expert chose the sample's first action."""
    chunk_discount: float
    """Discount from a sample to the next one."""

    def compute_advantages(self, values: Array, horizon: int | None) -> Array:
        """Return A(s, a) = sum of g^k r_k over n samples + g^n V(s_n) - V(s), float32 [n]; less where the episode ends.

        Args:
            values: V of all samples, float32 [n].
            horizon: n, number of samples; None: to the end of the episode, which leaves V(s_n) out.
        """
        if horizon is None:
            return (self.returns - values).astype(np.float32)
        sums = -values.astype(np.float64)
        position = np.arange(len(values))
        factor = 1.0
        for _ in range(horizon):
            running = position >= 0
            sums[running] += factor * self.rewards[position[running]]
            position[running] = self.following[position[running]]
            factor *= self.chunk_discount
        running = position >= 0
        sums[running] += factor * values[position[running]]
        return sums.astype(np.float32)


def read_returns(recording: Demonstrations, discount: float, trainer: str) -> RecordedReturns:
    """Read the rewards of a recording. Raises UserError if it has none, or all returns are equal.

    Args:
        discount: discount per environment step.
        trainer: name of the trainer, for messages.
    """
    refuse_masked_actions(recording)
    everything = np.arange(recording.num_samples())
    try:
        read = recording.read_rewards(everything, discount)
    except UserError as exc:
        raise UserError(f"trainer {trainer!r} needs recordings with rewards; give imitation.data ({exc})") from exc
    chunk = recording.read_samples(everything[:1])[1].shape[1]
    returns = read.rewards.astype(np.float64)
    # Backwards: the return of what follows is complete by then.
    for i in everything[::-1]:
        if read.following[i] >= 0:
            returns[i] += discount**chunk * returns[read.following[i]]
    span = float(returns.max() - returns.min())
    if not span:
        raise UserError(
            f"all {len(returns)} recorded samples have the return {returns[0]:g}: nothing tells good actions "
            f"from bad ones; record successes and failures, or use behaviour_cloning"
        )
    return RecordedReturns(
        recording=recording,
        rewards=(read.rewards / span).astype(np.float32),
        following=read.following,
        returns=(returns / span).astype(np.float32),
        interventions=np.zeros(len(returns), bool) if read.interventions is None else read.interventions,
        chunk_discount=discount**chunk,
    )
