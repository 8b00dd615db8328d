"""Buffer of model inputs on a learner, from their arrival until no training step needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from attrs import define, frozen

from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import Array, Observation
from vla_rl.runtime.messages.learning import SampleBatch


class Indexable(Protocol):
    """What `ModelInputs` and `Observation` have in common."""

    def take(self, indices: Array, /) -> Any: ...


T = TypeVar("T", bound=Indexable)


@define(eq=False)
class _Block:
    """A batch of samples, with the number of them that are still needed."""

    batch: SampleBatch
    needed: int


@frozen(eq=False)
class ScatteredSamples(Generic[T]):
    """B samples that are spread over several batches of one kind."""

    batches: Sequence[T]
    batch_of: Array
    """int64 [B]: index of each sample's batch."""
    rows: Array
    """int64 [B]: row of the sample in its batch."""

    def __len__(self) -> int:
        return len(self.rows)

    def take_all(self) -> T:
        """Return all samples as one batch."""
        return self.take(np.arange(len(self)))

    def take(self, indices: Array) -> T:
        """Return the samples at these positions (int64 [b]), in this order, as one batch."""
        batch_of = self.batch_of[indices]
        rows = self.rows[indices]
        order = np.argsort(batch_of, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(batch_of[order])) + 1)
        parts: list[Any] = [self.batches[int(batch_of[group[0]])].take(rows[group]) for group in groups]
        if len(parts) == 1:
            return parts[0]  # type: ignore[no-any-return]
        # From the order of the batches back to that of the samples.
        return type(parts[0]).concat(parts).take(np.argsort(order))  # type: ignore[no-any-return]


class SampleBuffer:
    """Samples by (worker whose policy made them, sample id). The thread of "concurrent" adds and releases while the
    thread of "call" reads; there is no lock, since single operations of a dict are atomic."""

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of the samples that are held."""
        self._blocks: dict[tuple[int, int], tuple[_Block, int]] = {}
        """(worker, sample id) -> the batch that holds the sample, and its row there."""

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, worker: int, batches: Iterable[SampleBatch]) -> None:
        """Hold samples that this worker's policy made, until `release_samples`."""
        for batch in batches:
            sample_ids = batch.sample_ids.tolist()
            block = _Block(batch, len(sample_ids))
            self.bytes += _bytes_of(batch)
            self._blocks.update({(worker, sample_id): (block, row) for row, sample_id in enumerate(sample_ids)})

    def find_inputs(self, workers: Array, sample_ids: Array) -> ScatteredSamples[ModelInputs]:
        """Return the model inputs of these samples."""
        positions = self._find_blocks(workers, sample_ids)
        blocks = [block for block, _ in positions]
        return _scatter_rows(blocks, [row for _, row in positions], lambda block: block.batch.inputs)

    def find_finals(self, workers: Array, sample_ids: Array) -> ScatteredSamples[Observation]:
        """Return the final observations of these samples, each of which has one."""
        blocks = [block for block, _ in self._find_blocks(workers, sample_ids)]
        rows = [
            int(np.searchsorted(block.batch.final_ids, sample_id))
            for block, sample_id in zip(blocks, sample_ids.tolist(), strict=True)
        ]
        return _scatter_rows(blocks, rows, _finals_of)

    def _find_blocks(self, workers: Array, sample_ids: Array) -> list[tuple[_Block, int]]:
        return [self._blocks[key] for key in zip(workers.tolist(), sample_ids.tolist(), strict=True)]

    def release_samples(self, sample_ids: Mapping[int, Array]) -> None:
        """Free these samples (worker -> sample ids), as far as they are held. The memory of a batch is freed with its
        last sample."""
        for worker, of_worker in sample_ids.items():
            for sample_id in of_worker.tolist():
                block, _ = self._blocks.pop((worker, sample_id), (None, 0))
                if block is not None:
                    block.needed -= 1
                    self.bytes -= 0 if block.needed else _bytes_of(block.batch)


def _scatter_rows(blocks: Sequence[_Block], rows: Sequence[int], content: Callable[[_Block], T]) -> ScatteredSamples[T]:
    """Return row `rows[i]` of the content of `blocks[i]`, for each i."""
    index = {block: i for i, block in enumerate(dict.fromkeys(blocks))}
    batch_of = np.array([index[block] for block in blocks], np.int64)
    return ScatteredSamples([content(block) for block in index], batch_of, np.array(rows, np.int64))


def _finals_of(block: _Block) -> Observation:
    assert block.batch.finals is not None, "a policy has not sent the final observation that a sample needs"
    return block.batch.finals


def _bytes_of(batch: SampleBatch) -> int:
    return batch.inputs.nbytes + (0 if batch.finals is None else batch.finals.nbytes)
