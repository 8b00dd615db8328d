"""Transitions from the samples of a rank."""

from __future__ import annotations

import numpy as np

from vla_rl.core.trainers import SampleFields, Transitions
from vla_rl.core.types import ActionSource, Array, Observation, to_numpy
from vla_rl.runtime.messages.learning import SampleRefs
from vla_rl.runtime.workers.learner.sample_buffer import SampleBuffer


def transitions_of(buffer: SampleBuffer, refs: SampleRefs, fields: SampleFields) -> Transitions | None:
    """Return samples as transitions, by trajectory and in the order of time, whatever worker they came from. None:
    there are no samples.

    Args:
        refs: workers and ids of the samples, int64 [S] each.
        fields: fields of the same samples, with those of `toolkit.trainers.transition_fields`.
    """
    columns = _required_field(fields, "transition_column")
    if not len(columns):
        return None
    order = np.lexsort((_required_field(fields, "transition_step"), columns))
    workers, sample_ids = (ids[order] for ids in refs)
    inputs = buffer.find_inputs(workers, sample_ids).take_all()
    continues = _required_field(fields, "transition_continues")[order]
    terminated = _required_field(fields, "transition_terminated")[order]
    cut = np.flatnonzero(~continues & ~terminated)
    frames = [inputs.obs.numpy()]
    if len(cut):
        frames.append(buffer.find_finals(workers[cut], sample_ids[cut]).take_all().numpy())
    first = np.arange(len(order))
    following = np.where(continues, first + 1, first)
    following[cut] = len(order) + np.arange(len(cut))
    return Transitions(
        frames=Observation.concat(frames),
        first=first,
        following=following,
        actions=_executed_actions(np.asarray(to_numpy(inputs.actions), np.float32), fields, order),
        rewards=_required_field(fields, "transition_rewards")[order],
        valid=_required_field(fields, "valid")[order],
        terminated=terminated,
        source=_ordered_field(fields, "source", order),
        expert_actions=_ordered_field(fields, "expert_actions", order),
        extras={name: np.asarray(to_numpy(extra)) for name, extra in inputs.extras.items()},
    )


def _executed_actions(chosen: Array, fields: SampleFields, order: Array) -> Array:
    """Return the policy's actions [S, C, A], with those of others where they took over."""
    source = fields.get("source")
    executed = fields.get("executed_actions")
    if source is None or executed is None:
        return chosen
    taken_over = (source != ActionSource.POLICY) & _required_field(fields, "valid")
    return np.where(taken_over[order][..., None], executed[order], chosen).astype(np.float32)


def _ordered_field(fields: SampleFields, name: str, order: Array) -> Array | None:
    array = fields.get(name)
    return None if array is None else array[order]


def _required_field(fields: SampleFields, name: str) -> Array:
    array = fields[name]
    assert array is not None
    return array
