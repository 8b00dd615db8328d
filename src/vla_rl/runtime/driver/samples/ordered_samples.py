"""Samples of a step in the order of their tickets, whatever the order in which tickets are collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from vla_rl.core.types import Advantages, Array
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, batch_fields, find_samples


@frozen(kw_only=True, eq=False)
class OrderedSamples:
    """S samples in the order of their tickets: arrays int64 [S] and batch fields [S, ...]."""

    numbers: Array
    steps: Array
    """Ticket of each sample, and its chunk step there."""
    workers: Array
    sample_ids: Array
    """Workers and sample ids, as in `SampleIndex`."""
    fields: Mapping[str, Array | None]

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, index: Any) -> OrderedSamples:
        """Return the samples at an index: a slice, or int64 [K]."""
        return OrderedSamples(
            numbers=self.numbers[index],
            steps=self.steps[index],
            workers=self.workers[index],
            sample_ids=self.sample_ids[index],
            fields={name: None if array is None else array[index] for name, array in self.fields.items()},
        )

    def sum_field(self, name: str) -> float:
        """Return the sum of a batch field, at least 1e-8, as it divides the loss."""
        array = self.fields[name]
        assert array is not None
        return max(float(array.sum()), 1e-8)

    @staticmethod
    def concat(parts: Sequence[OrderedSamples]) -> OrderedSamples:
        """Join parts, one after another."""

        def join_arrays(arrays: Sequence[Any]) -> Any:
            return None if any(array is None for array in arrays) else np.concatenate(arrays)

        return OrderedSamples(
            numbers=join_arrays([part.numbers for part in parts]),
            steps=join_arrays([part.steps for part in parts]),
            workers=join_arrays([part.workers for part in parts]),
            sample_ids=join_arrays([part.sample_ids for part in parts]),
            fields={name: join_arrays([part.fields[name] for part in parts]) for name in parts[0].fields},
        )

    @staticmethod
    def from_batch(batch: RolloutBatch, advantages: Advantages) -> OrderedSamples:
        """Return the samples of a rollout batch, with the fields that learners get."""
        samples = find_samples(batch.rollout, np.arange(len(batch.numbers)), batch)
        unordered = OrderedSamples(
            numbers=batch.numbers[samples.columns],
            steps=samples.steps,
            workers=samples.workers,
            sample_ids=samples.sample_ids,
            fields=batch_fields(batch.rollout, advantages, samples),
        )
        return unordered.take(np.lexsort((unordered.steps, unordered.numbers)))
