"""Buffer of model inputs on a learner, from their arrival until no training step needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar, cast

import numpy as np
from attrs import define, frozen

from vla_rl.core.trainers import ModelInputs, SampleFields, Transitions
from vla_rl.core.types import ActionSource, Array, Observation, to_numpy
from vla_rl.runtime.messages.learning import SampleBatch, SampleRefs

T = TypeVar("T", ModelInputs, Observation)


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
        parts = [self.batches[int(batch_of[group[0]])].take(rows[group]) for group in groups]
        if len(parts) == 1:
            return parts[0]
        # From the order of the batches back to that of the samples.
        return type(parts[0]).concat(parts).take(np.argsort(order))


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
        assert all(block.batch.finals is not None for block in blocks), "a policy has not sent a final observation"
        rows = [
            int(np.searchsorted(block.batch.final_ids, sample_id))
            for block, sample_id in zip(blocks, sample_ids.tolist(), strict=True)
        ]
        return _scatter_rows(blocks, rows, lambda block: cast(Observation, block.batch.finals))

    def _find_blocks(self, workers: Array, sample_ids: Array) -> list[tuple[_Block, int]]:
        return [self._blocks[key] for key in zip(workers.tolist(), sample_ids.tolist(), strict=True)]

    def release_samples(self, sample_ids: Mapping[int, Array]) -> None:
        """Free these samples (worker -> sample ids), as far as they are held. A batch is freed with its last sample."""
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


def _bytes_of(batch: SampleBatch) -> int:
    return batch.inputs.nbytes + (0 if batch.finals is None else batch.finals.nbytes)


def transitions_of(buffer: SampleBuffer, refs: SampleRefs, fields: SampleFields) -> Transitions | None:
    """Return samples as transitions, by trajectory and time, whatever worker they came from. None: no samples.

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
