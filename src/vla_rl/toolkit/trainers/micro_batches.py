"""Micro-batches that a rank trains on: model inputs and fields of its samples, on the rank's device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen

from vla_rl.core.capabilities import HasReference, require_capability
from vla_rl.core.fields import arrange_fields
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.trainers import ModelInputs, OptimizerStep, SampleFields, SampleInputs
from vla_rl.core.types import Array, Batch, Chunk
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.trainers.trained_model import TrainedModel


@frozen(eq=False)
class DeviceSamples:
    """Samples of a micro-batch that are on the device, or on their way."""

    inputs: ModelInputs
    tensors: Mapping[str, torch.Tensor | None]
    """Fields of `Batch` other than the model inputs."""
    copied: Any = None
    """CUDA event after the copies; None: they are done."""


class DeviceCopies:
    """Copies to one device. On a GPU they go through pinned memory, in a separate stream: the host does not wait, and
    the device computes meanwhile. States and step counts stay on the host, where some models read them. On a CPU all
    model inputs stay where they are."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def can_overlap(self) -> bool:
        """Whether copies run while the device computes."""
        return self._stream is not None

    def copy_samples(self, inputs: ModelInputs, fields: Mapping[str, Array | None]) -> DeviceSamples:
        """Copy samples; `wait_for` them before use."""
        if self._stream is None:
            tensors = {
                name: None if array is None else torch.tensor(array, device=self._device)
                for name, array in fields.items()
            }
            return DeviceSamples(inputs, tensors)
        with torch.cuda.stream(self._stream):
            tensors = {name: self._copy_tensor(array) for name, array in fields.items()}
            copies = ModelInputs(
                obs=evolve(inputs.obs, images={name: self._copy_tensor(a) for name, a in inputs.obs.images.items()}),
                actions=self._copy_tensor(inputs.actions),
                extras={name: self._copy_tensor(array) for name, array in inputs.extras.items()},
            )
            return DeviceSamples(copies, tensors, self._stream.record_event())

    def _copy_tensor(self, array: Any) -> Any:
        return None if array is None else as_tensor(array, self._device)

    def wait_for(self, samples: DeviceSamples) -> None:
        """Let what the device computes next wait for these copies."""
        if samples.copied is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(samples.copied)
        inputs = samples.inputs
        for value in (*samples.tensors.values(), *inputs.obs.images.values(), inputs.actions, *inputs.extras.values()):
            if isinstance(value, torch.Tensor):
                value.record_stream(stream)  # their memory belongs to the other stream


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
