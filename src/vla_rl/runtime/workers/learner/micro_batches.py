"""Micro-batches that a rank trains on: model inputs and fields of its samples, on the rank's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from attrs import frozen

from vla_rl.core.fields import arranged
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Array, Batch, Chunk
from vla_rl.runtime.messages.learning import OptimizerStep
from vla_rl.runtime.messages.model_inputs import ModelInputs
from vla_rl.runtime.workers.learner.sample_buffer import ScatteredSamples
from vla_rl.runtime.workers.learner.trained_model import TrainedModel

InputRows = ModelInputs | ScatteredSamples[ModelInputs]
"""Model inputs of samples: one batch, or rows of several."""
SampleFields = Mapping[str, "Array | None"]
"""Fields of `Batch` other than the model inputs, [B, ...] each."""


@frozen(eq=False)
class MicroBatches:
    """Builder of the micro-batches of one rank."""

    trained: TrainedModel
    algorithm: Algorithm

    def build(self, rows: InputRows, fields: SampleFields, indices: Array, step: OptimizerStep, version: int) -> Batch:
        """Build one micro-batch of the rank's samples.

        Args:
            rows, fields: the rank's samples, in one order.
            indices: samples of the micro-batch, int64 [b].
            step: optimiser step, whose divisors normalise the weights.
            version: version of the learner's weights.
        """
        inputs = rows.take(indices)

        tensors: dict[str, Any] = {
            name: None if array is None else torch.tensor(array[indices], device=self.trained.device)
            for name, array in fields.items()
            if name not in ("counts", "value_counts")
        }
        tensors["lag"] = version - tensors.pop("versions")
        tensors["weights"] = tensors["weights"] / step.divisor
        if tensors["value_weights"] is not None:
            tensors["value_weights"] = tensors["value_weights"] / step.value_divisor
        chunk = Chunk(
            actions=inputs.actions, log_probs=tensors["log_probs"], values=tensors["values"], extras=inputs.extras
        )
        reference = None
        if self.algorithm.needs.reference:
            model = self.trained.model
            with torch.no_grad():
                reference = self.trained.strategy.run(lambda: model.reference_log_probs(inputs.obs, chunk))
        return Batch(obs=inputs.obs, chunk=chunk, reference_log_probs=reference, **arranged(Batch, tensors))

    def dummy(self, fields: SampleFields, step: OptimizerStep, version: int) -> Batch:
        """Build a micro-batch of one sample with weight 0. `fields`: any samples, for shapes and types."""
        zeros = {
            name: None if array is None else np.zeros((1, *array.shape[1:]), array.dtype)
            for name, array in fields.items()
        }
        return self.build(self.trained.dummy, zeros, np.zeros(1, np.int64), step, version)
