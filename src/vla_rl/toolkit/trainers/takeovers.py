"""What takeovers are for a trainer: the end of the policy's episode for critics, and demonstrations for a policy."""

from __future__ import annotations

import attrs
import numpy as np

from vla_rl.core.trainers import Transitions
from vla_rl.core.types import ActionSource, Array


def ended_by_takeovers(transitions: Transitions) -> Transitions:
    """Return the transitions, of which those that led to a takeover end their episode without further reward.

    RLIF (Luo et al. 2023, arXiv:2311.12996) learns from takeovers alone, by a negative reward for an action that led to
    one. Here the rewards that follow are lost, which works the same way where success is rewarded. Chunks that
    began with a takeover are left as they are.
    """
    if transitions.source is None:
        return transitions
    others = (transitions.source != ActionSource.POLICY) & transitions.valid
    taken_over = ~others[:, :-1] & others[:, 1:]
    begins = np.zeros(len(transitions.frames), bool)
    begins[transitions.first[others[:, 0]]] = True
    last = transitions.valid.sum(1) - 1
    by_policy = ~others[np.arange(len(transitions)), last]
    after = np.cumsum(np.pad(taken_over, ((0, 0), (1, 0))), axis=1) > 0
    return attrs.evolve(
        transitions,
        rewards=np.where(after, 0.0, transitions.rewards).astype(np.float32),
        terminated=transitions.terminated | taken_over.any(1) | (by_policy & begins[transitions.following]),
    )


def find_corrections(transitions: Transitions) -> Array:
    """Return the positions of chunks whose executed actions all came from another source, int64 [N]."""
    if transitions.source is None:
        return np.zeros(0, np.int64)
    return np.flatnonzero(((transitions.source != ActionSource.POLICY) | ~transitions.valid).all(1))


def with_last_action_repeated(transitions: Transitions) -> Transitions:
    """Return the transitions with the last executed action in place of those that were not executed, as in a recording
    of demonstrations."""
    last = transitions.valid.sum(1) - 1
    index = np.minimum(np.arange(transitions.valid.shape[1]), last[:, None])
    return attrs.evolve(transitions, actions=np.take_along_axis(transitions.actions, index[..., None], axis=1))
