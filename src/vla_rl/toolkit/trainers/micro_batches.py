"""Micro-batches that a rank trains on: model inputs and fields of its samples, on the rank's device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vla_rl.core.capabilities import HasReference, require_capability
from vla_rl.core.fields import arrange_fields
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.trainers import OptimizerStep, SampleFields, SampleInputs
from vla_rl.core.types import Array, Batch, Chunk
from vla_rl.toolkit.trainers.device_copies import DeviceCopies, DeviceSamples
from vla_rl.toolkit.trainers.trained_model import TrainedModel


class MicroBatches:
    """Builder of the micro-batches of one rank."""

    def __init__(self, trained: TrainedModel, algorithm: Algorithm) -> None:
        self._trained = trained
        self._algorithm = algorithm
        self._copies = DeviceCopies(trained.device)

    def iterate_batches(
        self,
        rows: SampleInputs | None,
        fields: SampleFields,
        micro_batches: Sequence[Array],
        step: OptimizerStep,
        version: int,
    ) -> Iterator[Batch]:
        """Yield the micro-batches of the rank's samples. On a GPU the next one is copied while one is computed.

        Args:
            rows, fields: the rank's samples, in one order; without micro-batches there are none.
            micro_batches: samples of each micro-batch, int64 [b].
            step: optimiser step, whose divisors normalise the weights.
            version: version of the learner's weights.
        """
        following: DeviceSamples | None = None
        for i, indices in enumerate(micro_batches):
            assert rows is not None
            samples = self._copy_samples(rows, fields, indices) if following is None else following
            ahead = self._copies.can_overlap and i + 1 < len(micro_batches)
            following = self._copy_samples(rows, fields, micro_batches[i + 1]) if ahead else None
            yield self._build_batch(samples, step, version)

    def build_dummy(self, fields: SampleFields, step: OptimizerStep, version: int) -> Batch:
        """Build a micro-batch of one sample with weight 0. `fields`: any samples, for shapes and types."""
        zeros = {
            name: None if array is None else np.zeros((1, *array.shape[1:]), array.dtype)
            for name, array in fields.items()
        }
        return self._build_batch(
            self._copy_samples(self._trained.dummy_inputs, zeros, np.zeros(1, np.int64)), step, version
        )

    def _copy_samples(self, rows: SampleInputs, fields: SampleFields, indices: Array) -> DeviceSamples:
        arrays = {
            name: None if array is None else array[indices]
            for name, array in fields.items()
            # The driver has summed them, in the step's divisors.
            if name not in ("counts", "value_counts")
        }
        return self._copies.copy_samples(rows.take(indices), arrays)

    def _build_batch(self, samples: DeviceSamples, step: OptimizerStep, version: int) -> Batch:
        self._copies.wait_for(samples)
        inputs = samples.inputs
        tensors: dict[str, Any] = dict(samples.tensors)
        tensors["lag"] = version - tensors.pop("versions")
        tensors["weights"] = tensors["weights"] / step.divisor
        if tensors["value_weights"] is not None:
            tensors["value_weights"] = tensors["value_weights"] / step.value_divisor
        chunk = Chunk(
            actions=inputs.actions,
            log_probs=tensors["log_probs"],
            values=tensors["values"],
            extras=inputs.extras,
            source=tensors.pop("source", None),
        )
        reference = None
        if self._algorithm.needs.reference:
            model = require_capability(self._trained.model, HasReference, "an algorithm with a reference")
            with torch.no_grad():
                reference = self._trained.strategy.run(lambda: model.reference_log_probs(inputs.obs, chunk))
        return Batch(obs=inputs.obs, chunk=chunk, reference_log_probs=reference, **arrange_fields(Batch, tensors))
