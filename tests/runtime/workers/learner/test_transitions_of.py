"""Transitions from the samples that a learner holds: order, successors, final observations, takeovers."""

from __future__ import annotations

import numpy as np

from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import ActionSource
from vla_rl.runtime.messages.learning import SampleBatch
from vla_rl.runtime.workers.learner.sample_buffer import SampleBuffer, transitions_of
from vla_rl.testing import synthetic

CHUNK = 2
INFO = synthetic.env_info(cameras=1, pixels=8, state_dim=2, action_dim=1)


def batch_of(ids, final_ids, seed):
    obs = synthetic.observation(INFO, len(ids), seed=seed)
    actions = np.arange(len(ids) * CHUNK, dtype=np.float32).reshape(len(ids), CHUNK, 1) + 100 * seed
    finals = synthetic.observation(INFO, len(final_ids), seed=seed + 50) if len(final_ids) else None
    return SampleBatch(
        sample_ids=np.array(ids),
        inputs=ModelInputs(obs=obs, actions=actions, extras={}),
        final_ids=np.array(final_ids, np.int64),
        finals=finals,
    )


def buffer_and_fields():
    """Worker 0 has trajectory 1 (three chunks, cut off), worker 4 has trajectory 0 (two chunks, solved)."""
    buffer = SampleBuffer()
    one, other = batch_of([5, 6, 7], [7], 1), batch_of([5, 6], [], 2)
    buffer.add(0, [one])
    buffer.add(4, [other])
    workers, ids = np.array([0, 4, 0, 4, 0]), np.array([7, 6, 5, 5, 6])
    fields = {
        "transition_column": np.array([1, 0, 1, 0, 1]),
        "transition_step": np.array([2, 1, 0, 0, 1]),
        "transition_continues": np.array([False, False, True, True, True]),
        "transition_terminated": np.array([False, True, False, False, False]),
        "transition_rewards": np.array([[7, 7], [6, 0], [5, 5], [9, 9], [8, 8]], np.float32),
        "valid": np.array([[True, True], [True, False], [True, True], [True, True], [True, True]]),
    }
    return buffer, (workers, ids), fields, one, other


def test_samples_are_put_in_order_with_what_followed():
    buffer, refs, fields, one, other = buffer_and_fields()
    transitions = transitions_of(buffer, refs, fields)
    assert transitions.rewards.tolist() == [[9, 9], [6, 0], [5, 5], [8, 8], [7, 7]]
    assert transitions.terminated.tolist() == [False, True, False, False, False]
    states = transitions.frames.state
    expected = np.concatenate([other.inputs.obs.state, one.inputs.obs.state])
    assert np.array_equal(states[transitions.first], expected)
    following = states[transitions.following]
    assert np.array_equal(following[[0, 2, 3]], expected[[1, 3, 4]])
    assert np.array_equal(following[4], one.finals.state[0])
    assert len(states) == 6, "each observation once"
    assert transitions.actions[:, 0, 0].tolist() == [200, 202, 100, 102, 104]


def test_actions_of_others_replace_the_policys():
    buffer, refs, fields, _, _ = buffer_and_fields()
    source = np.full((5, CHUNK), ActionSource.POLICY, np.int8)
    source[2, 1] = ActionSource.PERSON
    source[1, 1] = ActionSource.PERSON  # not valid
    executed = np.full((5, CHUNK, 1), -1, np.float32)
    actions = transitions_of(buffer, refs, fields | {"source": source, "executed_actions": executed}).actions[..., 0]
    assert actions.tolist() == [[200, 201], [202, 203], [100, -1], [102, 103], [104, 105]]


def test_no_samples_are_no_transitions():
    buffer, _, fields, _, _ = buffer_and_fields()
    none = {name: array[:0] for name, array in fields.items()}
    assert transitions_of(buffer, (np.zeros(0, np.int64), np.zeros(0, np.int64)), none) is None


def test_sources_and_labels_are_put_in_order_too():
    buffer, refs, fields, _, _ = buffer_and_fields()
    labels = np.arange(5, dtype=np.float32)[:, None, None] + np.zeros((5, CHUNK, 1), np.float32)
    source = np.array([[0, 0], [1, 1], [2, 2], [0, 1], [2, 0]], np.int8)
    executed = np.zeros((5, CHUNK, 1), np.float32)
    transitions = transitions_of(
        buffer, refs, {**fields, "expert_actions": labels, "source": source, "executed_actions": executed}
    )
    assert transitions.expert_actions[:, 0, 0].tolist() == [3, 1, 2, 4, 0]
    assert transitions.source.tolist() == [[0, 1], [1, 1], [2, 2], [2, 0], [0, 0]]
    assert transitions_of(buffer, refs, fields).expert_actions is None
