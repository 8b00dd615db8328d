"""Assembly of worker reports into one rollout batch, and of samples into the arrays of an update. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen

from vla_rl.core.errors import PluginError
from vla_rl.core.fields import ADVANTAGES, ROLLOUT, SAMPLE_IDS, Field, arrange_fields, list_arrays, read_field
from vla_rl.core.samples import FIELDS, join_columns, stack_columns, take_columns
from vla_rl.core.types import Advantages, Array, Rollout, SampleRecord
from vla_rl.runtime.messages.learning import SampleRefs
from vla_rl.runtime.messages.reports import TrajectoryResult


@frozen(kw_only=True, eq=False)
class RolloutSamples(SampleRecord):
    """S trainable samples (chunk steps) of a rollout, in time-major order unless said otherwise."""

    steps: Array
    columns: Array
    numbers: Array
    """Chunk step t, column n and ticket of each sample, int64 [S]."""
    workers: Array
    sample_ids: Array
    """Worker whose policy made each sample, and the sample's id there, int64 [S]."""
    fields: Mapping[str, Array | None] = field(factory=dict)
    """What learners get of them, [S, ...]: fields of `Batch`, with "counts" and "value_counts" [S]."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def refs(self) -> SampleRefs:
        return self.workers, self.sample_ids

    def in_ticket_order(self) -> RolloutSamples:
        """Return the samples in the order of their tickets, whatever the order in which tickets are collected."""
        return self.take(np.lexsort((self.steps, self.numbers)))

    def sum_field(self, name: str) -> float:
        """Return the sum of a field, at least 1e-8, as it divides the loss."""
        array = self.fields[name]
        assert array is not None
        return max(float(array.sum()), 1e-8)


@frozen(kw_only=True, eq=False)
class RolloutBatch:
    """Trajectory records of a rollout, and the workers that hold its model inputs."""

    rollout: Rollout
    """The trajectory records."""
    sample_ids: Array
    """Sample id of each chunk step on its worker, int64 [T, N]; -1 where a chunk step has none."""
    workers: Array
    numbers: Array
    """Worker of each ticket's policy, and number of the ticket, int64 [N]."""
    ended: Array | None = None
    """bool [T, N]: the chunk step is followed by a final observation, whose value can be recomputed."""
    ranks: Array | None = None
    """Learner rank that holds each sample, once it was moved there, int64 [T, N]."""

    def cut_columns(self, rollout: Rollout, columns: Array) -> RolloutBatch:
        """Return the columns (indices) that `rollout` was cut to."""
        return RolloutBatch(rollout=rollout, **take_columns(list_arrays(self, SAMPLE_IDS), columns))

    def ids_by_worker(self, columns: Array | None = None) -> dict[int, Array]:
        """Return the sample ids of all columns, or of those in `columns` (bool [N]): worker -> int64."""
        chosen = np.ones(len(self.workers), bool) if columns is None else columns
        ids_by_worker = {}
        for worker in np.unique(self.workers[chosen]).tolist():
            ids = self.sample_ids[:, chosen & (self.workers == worker)]
            ids_by_worker[worker] = ids[ids >= 0]
        return ids_by_worker


def assemble_rollout(step: int, trajectories: Sequence[tuple[int, TrajectoryResult]], group_size: int) -> RolloutBatch:
    """Build a rollout batch of trajectories in the order of their tickets, (worker, result) each, and pad them."""
    results = [trajectory for _, trajectory in trajectories]
    of_env = [result.env_part for result in results]
    parts = [{**result.env_part.record, **result.policy_part} for result in results]
    if both := of_env[0].record.keys() & results[0].policy_part.keys():
        raise PluginError(f"the simulator and the model both declare {', '.join(sorted(both))}; rename one (extras)")
    features = [part.pop("features") for part in parts if "features" in part]
    arrays = stack_columns(parts)
    episodes = [half.episodes[0] if half.episodes else None for half in of_env]
    numbers = np.array([half.number for half in of_env], np.int64)
    ids = {field.name: arrays.pop(field.name) for field in SAMPLE_IDS if field.name in arrays}
    rollout = Rollout(
        step=step,
        groups=torch.from_numpy(numbers // group_size),
        success=torch.tensor([episode is not None and episode.success_once for episode in episodes]),
        episodes=tuple(episode for half in of_env for episode in half.episodes),
        features=torch.from_numpy(np.stack(features)) if features else None,
        tasks=tuple(episode.task for episode in episodes if episode is not None) if all(episodes) else (),
        **arrange_fields(Rollout, {"values": None, "next_values": None} | _make_tensors(arrays)),
    )
    workers = np.array([worker for worker, _ in trajectories], np.int64)
    return RolloutBatch(rollout=rollout, workers=workers, numbers=numbers, **ids)


def _make_tensors(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def join_batches(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """Join rollouts column by column, with the step and the episodes of the last one. Numbers that plugins declare are
    left out where a rollout has none: a world model imagines none."""
    if len(parts) == 1:
        return parts[0]
    rollouts = [part.rollout for part in parts]
    last = rollouts[-1]
    fields = [list_arrays(rollout, ROLLOUT) for rollout in rollouts]
    names = [name for name in fields[-1] if name in FIELDS or all(name in one for one in fields)]
    joined_fields = join_columns([{name: one[name] for name in names if name in one} for one in fields])
    tasks = [rollout.tasks for rollout in rollouts]
    joined = last.evolve(
        **arrange_fields(Rollout, _make_tensors(joined_fields)),
        tasks=tuple(chain.from_iterable(tasks)) if all(tasks) else (),
        findings={name: torch.cat([rollout.findings[name] for rollout in rollouts]) for name in last.findings},
    )
    return RolloutBatch(rollout=joined, **join_columns([list_arrays(part, SAMPLE_IDS) for part in parts]))


def joined_advantages(first: Advantages, second: Advantages) -> Advantages:
    """Join the advantages of two rollouts from one algorithm, column by column. Metrics are those of the second."""
    counted = [evolve(one, counts=one.divisors[0], value_counts=one.divisors[1]) for one in (first, second)]
    arrays = join_columns([list_arrays(one, ADVANTAGES) for one in counted])
    return evolve(second, **arrange_fields(Advantages, _make_tensors(arrays)))


def find_samples(selected: Rollout, columns: Array, batch: RolloutBatch) -> RolloutSamples:
    """Return the samples of the columns (indices) of a batch that `selected` consists of, without fields."""
    steps, selected_columns = np.nonzero(selected.samples.numpy())
    source = columns[selected_columns]
    return RolloutSamples(
        steps=steps,
        columns=selected_columns,
        numbers=batch.numbers[source],
        workers=batch.workers[source],
        sample_ids=batch.sample_ids[steps, source],
    )


def all_samples(batch: RolloutBatch, advantages: Advantages | None = None) -> RolloutSamples:
    """Return all samples of a batch; with advantages, with what learners get. Weights are not divided yet."""
    samples = find_samples(batch.rollout, np.arange(len(batch.numbers)), batch)
    return samples if advantages is None else evolve(samples, fields=_gather_fields(batch.rollout, advantages, samples))


def _gather_fields(rollout: Rollout, advantages: Advantages, samples: RolloutSamples) -> dict[str, Array | None]:
    columns: list[tuple[Any, tuple[Field, ...]]] = [(rollout, ROLLOUT), (advantages, ADVANTAGES)]
    known = {one.name for _, table in columns for one in table}
    tensors = {one.name: read_field(holder, one) for holder, table in columns for one in table if one.in_batch}
    tensors |= {name: one for holder, _ in columns for name, one in holder.extras.items() if name not in known}
    tensors |= dict(zip(("counts", "value_counts"), advantages.divisors, strict=True))
    fields = {
        name: None if tensor is None else tensor.numpy()[samples.steps, samples.columns]
        for name, tensor in tensors.items()
    }
    for name in ("counts", "value_counts"):
        array = fields[name]
        fields[name] = (
            np.zeros(len(samples)) if array is None else array.reshape(len(array), -1).sum(1, dtype=np.float64)
        )
    return fields
