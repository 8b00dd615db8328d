"""Buffer of model inputs on a learner, from their arrival until no training step needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from attrs import define, frozen

from vla_rl.core.types import Array, Observation
from vla_rl.runtime.messages.model_inputs import ModelInputs, SampleBatch, nbytes


class Indexable(Protocol):
    """What `ModelInputs` and `Observation` have in common."""

    def take(self, indices: Array, /) -> Any: ...


T = TypeVar("T", bound=Indexable)


@define(eq=False)
class _Block:
    """A batch of samples, with the number of them that are still needed."""

    part: SampleBatch
    left: int


@frozen(eq=False)
class ScatteredRows(Generic[T]):
    """B samples that are spread over several batches of one kind."""

    batches: Sequence[T]
    of: Array
    """int64 [B]: index of each sample's batch."""
    rows: Array
    """int64 [B]: row of the sample in its batch."""

    def __len__(self) -> int:
        return len(self.of)

    def take(self, indices: Array) -> T:
        """Return the samples at these positions (int64 [b]), in this order, as one batch."""
        of, rows = self.of[indices], self.rows[indices]
        order = np.argsort(of, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(of[order])) + 1)
        parts: list[Any] = [self.batches[int(of[group[0]])].take(rows[group]) for group in groups]
        if len(parts) == 1:
            return parts[0]  # type: ignore[no-any-return]
        return type(parts[0]).concat(parts).take(np.argsort(order))  # type: ignore[no-any-return]


class SampleBuffer:
    """Samples by (worker whose policy made them, sample id). The thread of "beside" adds and releases while the thread
    of "call" reads; there is no lock, since single operations of a dict are atomic.
    """

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of the samples that are held."""
        self._blocks: dict[tuple[int, int], tuple[_Block, int]] = {}
        """(worker, sample id) -> the batch that holds the sample, and its row there."""

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, worker: int, parts: Iterable[SampleBatch]) -> None:
        """Hold samples that this worker's policy made, until `release`."""
        for part in parts:
            block = _Block(part, len(part.places))
            self.bytes += _bytes_of(part)
            self._blocks.update({(worker, place): (block, row) for row, place in enumerate(part.places.tolist())})

    def heavy(self, workers: Array, places: Array) -> ScatteredRows[ModelInputs]:
        """Return the model inputs of these samples."""
        found = self._find(workers, places)
        return _rows([block for block, _ in found], [row for _, row in found], lambda block: block.part.heavy)

    def finals(self, workers: Array, places: Array) -> ScatteredRows[Observation]:
        """Return the final observations of these samples, each of which has one."""
        blocks = [block for block, _ in self._find(workers, places)]
        rows = [int(np.searchsorted(b.part.ended, place)) for b, place in zip(blocks, places.tolist(), strict=True)]
        return _rows(blocks, rows, _finals_of)

    def _find(self, workers: Array, places: Array) -> list[tuple[_Block, int]]:
        return [self._blocks[key] for key in zip(workers.tolist(), places.tolist(), strict=True)]

    def release(self, places: Mapping[int, Array]) -> None:
        """Free these samples (worker -> sample ids), as far as they are held. The memory of a batch is freed with its
        last sample.
        """
        for worker, of_worker in places.items():
            for place in of_worker.tolist():
                block, _ = self._blocks.pop((worker, place), (None, 0))
                if block is not None:
                    block.left -= 1
                    self.bytes -= 0 if block.left else _bytes_of(block.part)


def _rows(blocks: Sequence[_Block], rows: Sequence[int], batch_of: Callable[[_Block], T]) -> ScatteredRows[T]:
    """Return row `rows[i]` of the batch of `blocks[i]`, for each i."""
    index = {block: i for i, block in enumerate(dict.fromkeys(blocks))}
    of = np.array([index[block] for block in blocks], np.int64)
    return ScatteredRows([batch_of(block) for block in index], of, np.array(rows, np.int64))


def _finals_of(block: _Block) -> Observation:
    assert block.part.finals is not None, "a policy has not sent the final observation that a sample needs"
    return block.part.finals


def _bytes_of(part: SampleBatch) -> int:
    return part.heavy.nbytes + (0 if part.finals is None else nbytes(part.finals))
