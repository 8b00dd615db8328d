"""Assembly of worker reports into one rollout batch, and of its samples into the arrays of an update. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen

from vla_rl.core.fields import ADVANTAGES, ROLLOUT, arrange_fields, read_field
from vla_rl.core.types import Advantages, Array, Rollout
from vla_rl.runtime.messages.reports import TrajectoryResult


@frozen(kw_only=True, eq=False)
class SampleIndex:
    """Trainable samples (chunk steps) of a rollout, in time-major order."""

    steps: Array
    columns: Array
    """Chunk step t and column n of each sample, int64 [S]."""
    workers: Array
    sample_ids: Array
    """Worker whose policy made each sample, and the sample's id there, int64 [S]."""


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
        return RolloutBatch(
            rollout=rollout,
            sample_ids=self.sample_ids[:, columns],
            workers=self.workers[columns],
            numbers=self.numbers[columns],
            ended=None if self.ended is None else self.ended[:, columns],
            ranks=None if self.ranks is None else self.ranks[:, columns],
        )

    def ids_by_worker(self, columns: Array | None = None) -> dict[int, Array]:
        """Return the sample ids of all columns, or of those in `columns` (bool [N]): worker -> int64."""
        chosen = np.ones(len(self.workers), bool) if columns is None else columns
        ids_by_worker = {}
        for worker in np.unique(self.workers[chosen]).tolist():
            ids = self.sample_ids[:, chosen & (self.workers == worker)]
            ids_by_worker[worker] = ids[ids >= 0]
        return ids_by_worker


def assemble_rollout(step: int, trajectories: Sequence[tuple[int, TrajectoryResult]], group_size: int) -> RolloutBatch:
    """Build one rollout batch of trajectories in the order of their tickets: (worker, result) of each. Shorter ones are
    padded.
    """
    workers = np.array([worker for worker, _ in trajectories], np.int64)
    parts = [{**trajectory.env_part.record, **trajectory.policy_part} for _, trajectory in trajectories]
    length = max(len(part["valid"]) for part in parts)

    def gather_field(key: str, fill: float = 0) -> torch.Tensor | None:
        if key not in parts[0]:
            return None
        sample = parts[0][key]
        out = np.full((length, len(parts), *sample.shape[1:]), fill, sample.dtype)
        for column, part in enumerate(parts):
            out[: len(part[key]), column] = part[key]
        return torch.from_numpy(out)

    of_env = [trajectory.env_part for _, trajectory in trajectories]
    first_episodes = [half.episodes[0] if half.episodes else None for half in of_env]
    numbers = np.array([half.number for half in of_env], np.int64)
    reported = [field for field in ROLLOUT if field.by_time and field.source in ("env", "policy")]
    tensors = {field.name: gather_field(field.name, field.fill) for field in reported}
    sample_ids = gather_field("sample", fill=-1)
    ended = gather_field("ended")
    assert sample_ids is not None
    rollout = Rollout(
        step=step,
        groups=torch.from_numpy(numbers // group_size),
        success=torch.tensor([episode is not None and episode.success_once for episode in first_episodes]),
        episodes=tuple(episode for half in of_env for episode in half.episodes),
        features=torch.from_numpy(np.stack([p["features"] for p in parts])) if "features" in parts[0] else None,
        tasks=tuple(episode.task for episode in first_episodes if episode is not None) if all(first_episodes) else (),
        **arrange_fields(Rollout, tensors),
    )
    return RolloutBatch(
        rollout=rollout,
        sample_ids=sample_ids.numpy(),
        workers=workers,
        numbers=numbers,
        ended=None if ended is None else ended.numpy(),
    )


def join_batches(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """Join rollouts column by column, with the step and the episodes of the last one."""
    if len(parts) == 1:
        return parts[0]
    length = max(len(part.sample_ids) for part in parts)
    last = parts[-1]

    def joined_columns(arrays: Sequence[Array], fill: int = 0) -> Array:
        padded = [np.full((length - len(array), *array.shape[1:]), fill, array.dtype) for array in arrays]
        return np.concatenate([np.concatenate(pair) for pair in zip(arrays, padded, strict=True)], 1)

    changes: dict[str, Any] = {}
    for field in ROLLOUT:
        if read_field(last.rollout, field) is not None:
            tensors = [read_field(part.rollout, field) for part in parts]
            columns = [tensor.numpy() for tensor in tensors]
            changes[field.name] = torch.from_numpy(joined_columns(columns)) if field.by_time else torch.cat(tensors)
    changes = arrange_fields(Rollout, changes)
    tasks = [part.rollout.tasks for part in parts]
    changes["tasks"] = tuple(chain.from_iterable(tasks)) if all(tasks) else ()
    changes["findings"] = {
        name: torch.cat([part.rollout.findings[name] for part in parts]) for name in last.rollout.findings
    }
    by_step = {}
    for name, fill in (("sample_ids", -1), ("ended", 0), ("ranks", 0)):
        arrays = [getattr(part, name) for part in parts]
        by_step[name] = None if arrays[0] is None else joined_columns(arrays, fill)
    return RolloutBatch(
        rollout=last.rollout.evolve(**changes),
        workers=np.concatenate([part.workers for part in parts]),
        numbers=np.concatenate([part.numbers for part in parts]),
        **by_step,  # type: ignore[arg-type]
    )


def joined_advantages(first: Advantages, second: Advantages) -> Advantages:
    """Join the advantages of two rollouts from one algorithm, column by column. Metrics are those of the second."""
    length = max(len(part.advantages) for part in (first, second))

    def joined_columns(one: Any, other: Any) -> Any:
        if one is None or other is None:
            return None
        padded = [torch.cat((t, t.new_zeros(length - len(t), *t.shape[1:]))) for t in (one, other)]
        return torch.cat(padded, dim=1)

    changes = {field.name: joined_columns(read_field(first, field), read_field(second, field)) for field in ADVANTAGES}
    for name, one, other in zip(("counts", "value_counts"), first.divisors, second.divisors, strict=True):
        changes[name] = joined_columns(one, other)
    extras = {name: joined_columns(tensor, second.extras[name]) for name, tensor in first.extras.items()}
    return evolve(second, **changes, extras=extras)


def find_samples(selected: Rollout, columns: Array, batch: RolloutBatch) -> SampleIndex:
    """Return the samples of the columns (indices) of a batch that `selected` consists of, in time-major order."""
    steps, selected_columns = np.nonzero(selected.samples.numpy())
    source = columns[selected_columns]
    return SampleIndex(
        steps=steps, columns=selected_columns, workers=batch.workers[source], sample_ids=batch.sample_ids[steps, source]
    )


def batch_fields(rollout: Rollout, advantages: Advantages, samples: SampleIndex) -> dict[str, Array | None]:
    """Return the fields of `Batch` that trajectory records and advantages contain, [S, ...] for all samples. Weights
    are not divided yet; "counts" and "value_counts" [S] are added.
    """

    def of_samples(tensor: torch.Tensor | None) -> Array | None:
        return None if tensor is None else tensor.numpy()[samples.steps, samples.columns]

    def total_of_samples(tensor: torch.Tensor | None) -> Array:
        array = of_samples(tensor)
        return np.zeros(len(samples.steps)) if array is None else array.reshape(len(array), -1).sum(1, dtype=np.float64)

    counts, value_counts = advantages.divisors
    return {
        **{field.name: of_samples(read_field(rollout, field)) for field in ROLLOUT if field.in_batch},
        **{field.name: of_samples(read_field(advantages, field)) for field in ADVANTAGES if field.in_batch},
        **{name: of_samples(tensor) for name, tensor in advantages.extras.items()},
        "counts": total_of_samples(counts),
        "value_counts": total_of_samples(value_counts),
    }
