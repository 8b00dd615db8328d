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
    columns = _field(fields, "transition_column")
    if not len(columns):
        return None
    order = np.lexsort((_field(fields, "transition_step"), columns))
    workers, sample_ids = (ids[order] for ids in refs)
    inputs = buffer.inputs(workers, sample_ids).take(np.arange(len(order)))
    continues = _field(fields, "transition_continues")[order]
    terminated = _field(fields, "transition_terminated")[order]
    cut = np.flatnonzero(~continues & ~terminated)
    frames = [inputs.obs.numpy()]
    if len(cut):
        finals = buffer.finals(workers[cut], sample_ids[cut])
        frames.append(finals.take(np.arange(len(cut))).numpy())
    first = np.arange(len(order))
    following = np.where(continues, first + 1, first)
    following[cut] = len(order) + np.arange(len(cut))
    return Transitions(
        frames=Observation.concat(frames),
        first=first,
        following=following,
        actions=_executed(np.asarray(to_numpy(inputs.actions), np.float32), fields, order),
        rewards=_field(fields, "transition_rewards")[order],
        valid=_field(fields, "valid")[order],
        terminated=terminated,
        taken_over=np.asarray(_taken_over(fields, order).any(axis=1)),
        extras={name: np.asarray(to_numpy(extra)) for name, extra in inputs.extras.items()},
    )


def _executed(chosen: Array, fields: SampleFields, order: Array) -> Array:
    """Return the policy's actions [S, C, A], with those of others where they took over."""
    executed = fields.get("executed_actions")
    if executed is None:
        return chosen
    return np.where(_taken_over(fields, order)[..., None], executed[order], chosen).astype(np.float32)


def _taken_over(fields: SampleFields, order: Array) -> Array:
    """Return the executed actions that somebody else than the policy chose, bool [S, C]."""
    valid = _field(fields, "valid")[order]
    source = fields.get("source")
    return np.zeros_like(valid) if source is None else (source[order] != ActionSource.POLICY) & valid


def _field(fields: SampleFields, name: str) -> Array:
    array = fields[name]
    assert array is not None
    return array
