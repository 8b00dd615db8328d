"""Store of the samples that a policy's inferences made, until learners have them and no ticket needs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define

from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import Array, Chunk, Observation, to_numpy
from vla_rl.runtime.messages.ids import SampleId
from vla_rl.runtime.messages.model_inputs import SampleBatch
from vla_rl.runtime.messages.requests import StepRequest


@define(eq=False)
class Inference:
    """One inference of the policy for one lane, with its R samples."""

    number: int
    """First half of the samples' `SampleId`."""
    versions: Array
    """int64 [R]: versions of the weights that chose the actions."""
    log_probs: Array
    values: Array | None
    """Values of each sample, float32 [R] or [R, C]; None without a critic."""
    inputs: ModelInputs
    next_values: Array
    """Bootstrap values, float32 [R]; 0 where there is none."""
    needed: int
    """Number of samples that may still be needed; the inference is dropped when it is 0."""
    has_final: Array
    """bool [R]: samples that are followed by a final observation."""
    finals: Observation | None = None
    """Final observations of these samples, where learners recompute their values."""

    def batch(self, rows: Array) -> SampleBatch:
        """Return the samples of these rows, int64 ascending."""
        finals = self.finals
        rows_with_final = rows[self.has_final[rows]]
        if finals is not None:
            finals = taken(finals, np.searchsorted(np.flatnonzero(self.has_final), rows_with_final))
        return SampleBatch(
            sample_ids=SampleId.pack(self.number, rows),
            inputs=self.inputs.take(rows),
            final_ids=SampleId.pack(self.number, rows[:0] if finals is None else rows_with_final),
            finals=finals if finals is not None and len(finals) else None,
        )


class SampleStore:
    """Samples by inference and by ticket."""

    def __init__(self, keeps_finals: bool) -> None:
        """Create an empty store. `keeps_finals`: learners recompute values, so final observations are kept for them."""
        self.keeps_finals = keeps_finals
        self.count = 0
        """Number of inferences so far."""
        self.inferences: dict[int, Inference] = {}
        """Inferences by number, until none of their samples is needed."""
        self.tickets: dict[int, list[tuple[Inference, int]]] = {}
        """Ticket -> its chunk steps: (inference, row in its batch)."""

    def add(self, request: StepRequest, chunk: Chunk, part: slice, versions: Array) -> None:
        """Keep what was inferred for a lane's request: this part of the chunk, with weights of these versions."""
        assert request.obs is not None and chunk.log_probs is not None
        size = len(request.positions)
        inference = Inference(
            number=self.count,
            versions=versions,
            log_probs=to_numpy(chunk.log_probs)[part].astype(np.float32),
            values=None if chunk.values is None else to_numpy(chunk.values)[part].astype(np.float32),
            inputs=ModelInputs(
                obs=request.obs,
                actions=chunk.actions[part],
                extras={name: tensor[part] for name, tensor in chunk.extras.items()},
            ),
            next_values=np.zeros(size, np.float32),
            has_final=np.zeros(size, bool),
            needed=size,
        )
        self.count += 1
        self.inferences[inference.number] = inference
        for row, number in enumerate(request.numbers.tolist()):
            self.tickets.setdefault(number, []).append((inference, row))

    def add_finals(self, request: StepRequest, values: Array) -> None:
        """Add the bootstrap values, float32 [F], of a request's final observations to the last chunk steps of their
        tickets.
        """
        steps = [self.tickets[number][-1] for number in request.final_numbers.tolist()]
        inference = steps[0][0]  # a lane is in one inference
        rows = np.array([row for _, row in steps])
        inference.next_values[rows] = values
        inference.has_final[rows] = True
        if self.keeps_finals and request.final is not None:
            inference.finals = taken(request.final, np.argsort(rows))

    def forget(self, ticket: int, remaining: int = 0) -> None:
        """Drop a ticket's chunk steps except the first `remaining`."""
        steps = self.tickets.get(ticket, [])
        for inference, _ in steps[remaining:]:
            inference.needed -= 1
            if not inference.needed:
                del self.inferences[inference.number]
        del steps[remaining:]

    def release(self, tickets: Sequence[int] | None) -> None:
        """Drop the samples of these tickets; None: all samples."""
        if tickets is None:
            self.tickets.clear()
            self.inferences.clear()
            return
        for ticket in tickets:
            self.forget(ticket)
            self.tickets.pop(ticket, None)

    def batches(self, samples: Array) -> list[SampleBatch]:
        """Return samples by their ids, int64 ascending, where they are, by inference. Nothing is copied of an inference
        that is needed in full.
        """
        numbers, rows = SampleId.unpack(samples)
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        return [
            self.inferences[int(numbers[indices[0]])].batch(rows[indices])
            for indices in np.split(np.arange(len(samples)), cuts)
            if len(indices)
        ]

    def record(self, ticket: int) -> dict[str, Array]:
        """Return the policy's fields of a ticket's trajectory record, [T, ...]."""
        steps = self.tickets[ticket]
        record = {
            "log_probs": np.stack([inference.log_probs[row] for inference, row in steps]),
            "versions": np.array([inference.versions[row] for inference, row in steps], np.int64),
            "sample": np.array([SampleId.pack(inference.number, row) for inference, row in steps], np.int64),
            **_values_of(steps),
        }
        if self.keeps_finals:
            record["ended"] = np.array([inference.has_final[row] for inference, row in steps])
        return record


def taken(obs: Observation, rows: Array) -> Observation:
    """Return these rows of an observation, without a copy if they are all of it."""
    return obs if len(rows) == len(obs) else obs.take(rows)


def _values_of(steps: Sequence[tuple[Inference, int]]) -> dict[str, Array]:
    """Return values [T] or [T, C] and next_values [T]; empty without a critic."""
    values = [inference.values[row] for inference, row in steps if inference.values is not None]
    if not values:
        return {}
    return {
        "values": np.stack(values),
        "next_values": np.array([inference.next_values[row] for inference, row in steps], np.float32),
    }
