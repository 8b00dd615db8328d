"""Heavy parts that lie with a learner, from when they come to when nobody trains on them any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from attrs import define, frozen

from vla_rl.core.types import Array, Observation
from vla_rl.runtime.messages.model_inputs import ModelInputs, SampleBatch, nbytes


class Indexable(Protocol):
    """`ModelInputs` and `Observation`."""

    def take(self, indices: Array, /) -> Any: ...


T = TypeVar("T", bound=Indexable)


@define(eq=False)
class _Block:
    """A part, and how many of its samples are still wanted."""

    part: SampleBatch
    left: int


@frozen(eq=False)
class ScatteredRows(Generic[T]):
    """B rows that lie in several batches of one kind."""

    batches: Sequence[T]
    of: Array
    """int64 [B]: the batch of each."""
    rows: Array
    """int64 [B]: its row there."""

    def __len__(self) -> int:
        return len(self.of)

    def take(self, indices: Array) -> T:
        """Those at these positions (int64 [b]), in this order, as one batch."""
        of, rows = self.of[indices], self.rows[indices]
        order = np.argsort(of, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(of[order])) + 1)
        parts: list[Any] = [self.batches[int(of[group[0]])].take(rows[group]) for group in groups]
        if len(parts) == 1:
            return parts[0]  # type: ignore[no-any-return]
        return type(parts[0]).concat(parts).take(np.argsort(order))  # type: ignore[no-any-return]


class SampleBuffer:
    """Samples by the worker whose policy made them, and their place there. One thread adds while others read."""

    def __init__(self) -> None:
        self.bytes = 0
        """Of what lies here."""
        self._blocks: dict[tuple[int, int], tuple[_Block, int]] = {}
        """(worker, place) -> where the sample lies."""

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, worker: int, parts: Iterable[SampleBatch]) -> None:
        """Keep what that worker's policy made, until `release`."""
        for part in parts:
            block = _Block(part, len(part.places))
            self.bytes += _bytes_of(part)
            self._blocks.update({(worker, place): (block, row) for row, place in enumerate(part.places.tolist())})

    def heavy(self, workers: Array, places: Array) -> ScatteredRows[ModelInputs]:
        """These samples."""
        found = self._find(workers, places)
        return _rows([block for block, _ in found], [row for _, row in found], lambda block: block.part.heavy)

    def finals(self, workers: Array, places: Array) -> ScatteredRows[Observation]:
        """The observations behind these samples, each of which has one."""
        blocks = [block for block, _ in self._find(workers, places)]
        rows = [int(np.searchsorted(b.part.ended, place)) for b, place in zip(blocks, places.tolist(), strict=True)]
        return _rows(blocks, rows, _finals_of)

    def _find(self, workers: Array, places: Array) -> list[tuple[_Block, int]]:
        return [self._blocks[key] for key in zip(workers.tolist(), places.tolist(), strict=True)]

    def release(self, places: Mapping[int, Array]) -> None:
        """Forget these samples (worker -> places), as far as they lie here."""
        for worker, of_worker in places.items():
            for place in of_worker.tolist():
                block, _ = self._blocks.pop((worker, place), (None, 0))
                if block is not None:
                    block.left -= 1
                    self.bytes -= 0 if block.left else _bytes_of(block.part)


def _rows(blocks: Sequence[_Block], rows: Sequence[int], batch_of: Callable[[_Block], T]) -> ScatteredRows[T]:
    """`rows` of the batches of `blocks`, one each."""
    index = {block: i for i, block in enumerate(dict.fromkeys(blocks))}
    of = np.array([index[block] for block in blocks], np.int64)
    return ScatteredRows([batch_of(block) for block in index], of, np.array(rows, np.int64))


def _finals_of(block: _Block) -> Observation:
    assert block.part.finals is not None, "a policy has not sent the final observation that a sample needs"
    return block.part.finals


def _bytes_of(part: SampleBatch) -> int:
    return part.heavy.nbytes + (0 if part.finals is None else nbytes(part.finals))
