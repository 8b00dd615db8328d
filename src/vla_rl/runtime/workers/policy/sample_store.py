"""Store of the samples that a policy's inferences made, until learners have them and no ticket needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from attrs import define

from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import Array, Chunk, Observation, to_numpy
from vla_rl.runtime.messages.ids import SampleId
from vla_rl.runtime.messages.learning import SampleBatch
from vla_rl.runtime.messages.requests import StepRequest


@define(eq=False)
class Inference:
    """One inference of the policy for one lane, with its R samples."""

    number: int
    """First half of the samples' `SampleId`."""
    record: dict[str, Array]
    """The policy's fields of the trajectory record, [R, ...]: log-probs, versions of the weights that chose the
    actions, values and bootstrap values (0 for rows without one) where there is a critic, the model's extras, and
    "ended": samples that are followed by a final observation."""
    inputs: ModelInputs
    needed: int
    """Number of samples that may still be needed; the inference is dropped when it is 0."""
    finals: Observation | None = None
    """Final observations of the samples that have one, where learners recompute their values."""

    def make_batch(self, rows: Array) -> SampleBatch:
        """Return the samples of these rows, int64 ascending."""
        finals = self.finals
        ended = self.record["ended"]
        rows_with_final = rows[ended[rows]]
        if finals is not None:
            finals = select_observations(finals, np.searchsorted(np.flatnonzero(ended), rows_with_final))
        return SampleBatch(
            sample_ids=SampleId.pack(self.number, rows),
            inputs=self.inputs.take(rows),
            final_ids=SampleId.pack(self.number, rows[:0] if finals is None else rows_with_final),
            finals=finals if finals is not None and len(finals) else None,
        )


class SampleStore:
    """Samples by inference and by ticket."""

    def __init__(self, keeps_finals: bool, extras: Iterable[str] = ()) -> None:
        """Create an empty store.

        Args:
            keeps_finals: learners recompute values, so final observations are kept for them.
            extras: names of `Chunk.extras` that are part of the trajectory record.
        """
        self.keeps_finals = keeps_finals
        self.extras = tuple(extras)
        self.count = 0
        """Number of inferences so far."""
        self.inferences: dict[int, Inference] = {}
        """Inferences by number, until none of their samples is needed."""
        self.tickets: dict[int, list[int]] = {}
        """Ticket -> ids of its samples, one for each chunk step."""

    def add_inference(self, request: StepRequest, chunk: Chunk, part: slice, versions: Array) -> None:
        """Keep what was inferred for a lane's request: this part of the chunk, with weights of these versions."""
        assert request.obs is not None and chunk.log_probs is not None
        size = len(request.positions)
        reported = {"log_probs": chunk.log_probs, **{name: chunk.extras[name] for name in self.extras}}
        if chunk.values is not None:
            reported["values"] = chunk.values
        record = {name: to_numpy(array)[part].astype(np.float32) for name, array in reported.items()}
        record |= {"versions": versions, "ended": np.zeros(size, bool)}
        if chunk.values is not None:
            record["next_values"] = np.zeros(size, np.float32)
        inputs = ModelInputs(
            obs=request.obs,
            actions=chunk.actions[part],
            extras={name: tensor[part] for name, tensor in chunk.extras.items()},
        )
        inference = Inference(number=self.count, record=record, inputs=inputs, needed=size)
        self.count += 1
        self.inferences[inference.number] = inference
        ids = SampleId.pack(inference.number, np.arange(size)).tolist()
        for ticket, sample in zip(request.ticket_numbers.tolist(), ids, strict=True):
            self.tickets.setdefault(ticket, []).append(sample)

    def add_finals(self, request: StepRequest, values: Array) -> None:
        """Add bootstrap values, float32 [F], of a request's final observations to their tickets' last chunk steps."""
        last_ids = np.array([self.tickets[number][-1] for number in request.final_numbers.tolist()], np.int64)
        numbers, rows = SampleId.unpack(last_ids)
        inference = self.inferences[int(numbers[0])]  # a lane is in one inference
        inference.record["ended"][rows] = True
        if "next_values" in inference.record:
            inference.record["next_values"][rows] = values
        if self.keeps_finals and request.final is not None:
            # In the order of the rows: `make_batch` counts on it.
            inference.finals = select_observations(request.final, np.argsort(rows))

    def forget_ticket(self, ticket: int, remaining: int = 0) -> None:
        """Drop a ticket's chunk steps except the first `remaining`."""
        samples = self.tickets.get(ticket, [])
        self._drop_samples(samples[remaining:])
        del samples[remaining:]

    def release_tickets(self, tickets: Sequence[int] | None) -> None:
        """Drop the samples of these tickets; None: all samples."""
        if tickets is None:
            self.tickets.clear()
            self.inferences.clear()
            return
        self._drop_samples([sample for ticket in tickets for sample in self.tickets.pop(ticket, ())])

    def _drop_samples(self, samples: Sequence[int]) -> None:
        """Drop the inferences of which none but these samples was needed."""
        numbers, _ = SampleId.unpack(np.array(samples, np.int64))
        for number, count in zip(*(array.tolist() for array in np.unique(numbers, return_counts=True)), strict=True):
            inference = self.inferences[number]
            inference.needed -= count
            if not inference.needed:
                del self.inferences[number]

    def sample_batches(self, samples: Array) -> list[SampleBatch]:
        """Return samples by id, int64 ascending, by inference; one that is needed in full is not copied."""
        numbers, rows = SampleId.unpack(samples)
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        return [
            self.inferences[int(numbers[indices[0]])].make_batch(rows[indices])
            for indices in np.split(np.arange(len(samples)), cuts)
            if len(indices)
        ]

    def trajectory_records(self, tickets: Sequence[int]) -> list[dict[str, Array]]:
        """Return the policy's fields of each ticket's trajectory record, [T, ...]."""
        lengths = [len(self.tickets[ticket]) for ticket in tickets]
        samples = np.array([sample for ticket in tickets for sample in self.tickets[ticket]], np.int64)
        numbers, rows = SampleId.unpack(samples)
        by_inference = np.argsort(numbers, kind="stable")
        groups = np.split(by_inference, np.flatnonzero(np.diff(numbers[by_inference])) + 1)
        parts = [(self.inferences[int(numbers[group[0]])], rows[group]) for group in groups if len(group)]

        if not parts:
            return []
        fields = {"sample_ids": samples}
        for name in parts[0][0].record:
            if name != "ended" or self.keeps_finals:
                sorted_values = np.concatenate([inference.record[name][part] for inference, part in parts])
                fields[name] = np.empty_like(sorted_values)
                fields[name][by_inference] = sorted_values
        ends = np.cumsum(lengths).tolist()
        return [
            {name: values[end - length : end] for name, values in fields.items()}
            for length, end in zip(lengths, ends, strict=True)
        ]


def select_observations(obs: Observation, rows: Array) -> Observation:
    """Return these rows of an observation, without a copy if they are all of it."""
    return obs if len(rows) == len(obs) else obs.take(rows)
