"""From what workers report to one light rollout, and from its samples to the optimiser steps of each rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen

from vla_rl.core.fields import ADVANTAGES, ROLLOUT, arranged, read
from vla_rl.core.types import Advantages, Array, Rollout
from vla_rl.runtime.messages.reports import TrajectoryResult


@frozen(kw_only=True, eq=False)
class SampleIndex:
    """The trainable samples (chunk steps) of a rollout, in time-major order."""

    steps: Array
    columns: Array
    """int64 [S]: t and n."""
    workers: Array
    places: Array
    """int64 [S]: worker whose policy made it, and its place there."""


@frozen(kw_only=True, eq=False)
class RolloutBatch:
    """A rollout, and where its heavy parts lie."""

    rollout: Rollout
    """Its light part."""
    places: Array
    """int64 [T, N]: of each chunk step with its worker; -1: there is none."""
    workers: Array
    numbers: Array
    """int64 [N]: the worker of each ticket's policy, and the ticket's number."""
    ended: Array | None = None
    """bool [T, N]: behind this chunk step there is a final observation, which can be valued again."""
    ranks: Array | None = None
    """int64 [T, N]: the learner with whom the sample lies, once it was moved there."""

    def cut(self, rollout: Rollout, columns: Array) -> RolloutBatch:
        """The columns (indices) that `rollout` is cut to."""
        return RolloutBatch(
            rollout=rollout,
            places=self.places[:, columns],
            workers=self.workers[columns],
            numbers=self.numbers[columns],
            ended=None if self.ended is None else self.ended[:, columns],
            ranks=None if self.ranks is None else self.ranks[:, columns],
        )

    def places_of(self, columns: Array | None = None) -> dict[int, Array]:
        """Worker -> int64: where the samples of its columns lie, or of those among `columns` (bool [N])."""
        chosen = np.ones(len(self.workers), bool) if columns is None else columns
        places = {w: self.places[:, chosen & (self.workers == w)] for w in np.unique(self.workers[chosen]).tolist()}
        return {worker: of_worker[of_worker >= 0] for worker, of_worker in places.items()}


def assemble(step: int, tickets: Sequence[tuple[int, TrajectoryResult]], group_size: int) -> RolloutBatch:
    """One rollout of tickets, in the order of their numbers: (worker, what came of it) of each."""
    workers = np.array([worker for worker, _ in tickets], np.int64)
    parts = [{**ticket.finished.light, **ticket.chosen} for _, ticket in tickets]
    length = max(len(part["valid"]) for part in parts)

    def gather(key: str, fill: float = 0) -> torch.Tensor | None:
        if key not in parts[0]:
            return None
        sample = parts[0][key]
        out = np.full((length, len(parts), *sample.shape[1:]), fill, sample.dtype)
        for column, part in enumerate(parts):
            out[: len(part[key]), column] = part[key]
        return torch.from_numpy(out)

    first = [ticket.finished.episodes[0] if ticket.finished.episodes else None for _, ticket in tickets]
    numbers = np.array([ticket.finished.number for _, ticket in tickets], np.int64)
    reported = [field for field in ROLLOUT if field.by_time and field.source in ("env", "policy")]
    tensors = {field.name: gather(field.name, field.fill) for field in reported}
    places, ended = gather("sample", fill=-1), gather("ended")
    assert places is not None
    rollout = Rollout(
        step=step,
        groups=torch.from_numpy(numbers // group_size),
        success=torch.tensor([episode is not None and episode.success_once for episode in first]),
        episodes=tuple(episode for _, ticket in tickets for episode in ticket.finished.episodes),
        features=torch.from_numpy(np.stack([p["features"] for p in parts])) if "features" in parts[0] else None,
        tasks=tuple(episode.task for episode in first if episode is not None) if all(first) else (),
        **arranged(Rollout, tensors),
    )
    return RolloutBatch(
        rollout=rollout,
        places=places.numpy(),
        workers=workers,
        numbers=numbers,
        ended=None if ended is None else ended.numpy(),
    )


def joined(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """One rollout of several, column beside column, with the step of the last. Episodes are those of the last alone."""
    if len(parts) == 1:
        return parts[0]
    length, last = max(len(part.places) for part in parts), parts[-1]

    def beside(arrays: Sequence[Array], fill: int = 0) -> Array:
        padded = [np.full((length - len(array), *array.shape[1:]), fill, array.dtype) for array in arrays]
        return np.concatenate([np.concatenate(pair) for pair in zip(arrays, padded, strict=True)], 1)

    changes: dict[str, Any] = {}
    for field in ROLLOUT:
        if read(last.rollout, field) is not None:
            tensors = [read(part.rollout, field) for part in parts]
            columns = [tensor.numpy() for tensor in tensors]
            changes[field.name] = torch.from_numpy(beside(columns)) if field.by_time else torch.cat(tensors)
    changes = arranged(Rollout, changes)
    tasks = [part.rollout.tasks for part in parts]
    changes["tasks"] = tuple(task for of_part in tasks for task in of_part) if all(tasks) else ()
    changes["findings"] = {
        name: torch.cat([part.rollout.findings[name] for part in parts]) for name in last.rollout.findings
    }
    by_step = {}
    for name, fill in (("places", -1), ("ended", 0), ("ranks", 0)):
        arrays = [getattr(part, name) for part in parts]
        by_step[name] = None if arrays[0] is None else beside(arrays, fill)
    return RolloutBatch(
        rollout=last.rollout.evolve(**changes),
        workers=np.concatenate([part.workers for part in parts]),
        numbers=np.concatenate([part.numbers for part in parts]),
        **by_step,  # type: ignore[arg-type]
    )


def find_samples(rollout: Rollout, columns: Array, gathered: RolloutBatch) -> SampleIndex:
    """Samples of a rollout that was cut to `columns`, in time-major order."""
    steps, kept = np.nonzero(rollout.samples.numpy())
    own = columns[kept]
    return SampleIndex(steps=steps, columns=kept, workers=gathered.workers[own], places=gathered.places[steps, own])


def light_arrays(rollout: Rollout, advantages: Advantages, samples: SampleIndex) -> dict[str, Array | None]:
    """`Batch`'s light fields [S, ...] of all samples, weights not yet divided, plus "counts" and "value_counts" [S]."""

    def pick(tensor: torch.Tensor | None) -> Array | None:
        return None if tensor is None else tensor.numpy()[samples.steps, samples.columns]

    def total(tensor: torch.Tensor | None) -> Array:
        array = pick(tensor)
        return np.zeros(len(samples.steps)) if array is None else array.reshape(len(array), -1).sum(1, dtype=np.float64)

    counts, value_counts = advantages.divisors
    return {
        **{field.name: pick(read(rollout, field)) for field in ROLLOUT if field.in_batch},
        **{field.name: pick(read(advantages, field)) for field in ADVANTAGES if field.in_batch},
        **{name: pick(tensor) for name, tensor in advantages.extras.items()},
        "counts": total(counts),
        "value_counts": total(value_counts),
    }
