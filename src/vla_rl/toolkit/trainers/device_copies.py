"""Copies of micro-batches from host memory to a learner's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen

from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import Array
from vla_rl.toolkit.models.networks import as_tensor


@frozen(eq=False)
class DeviceSamples:
    """Samples of a micro-batch that are on the device, or on their way."""

    inputs: ModelInputs
    tensors: Mapping[str, torch.Tensor | None]
    """Fields of `Batch` other than the model inputs."""
    copied: Any = None
    """CUDA event after the copies; None: they are done."""


class DeviceCopies:
    """Copies to one device. On a GPU they go through pinned memory, in a separate stream: the host does not wait,
    and the device computes meanwhile. States and step counts stay on the host, where some models read them. On a CPU
    all model inputs stay where they are.
    """

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
