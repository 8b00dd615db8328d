"""Publication of weights from a learner to policies in other processes.

A version travels as the bits of every trainable tensor, through Ray's object store: it is copied into the store once,
and all policies of a node read it there. A policy copies it to its device while it acts, and swaps it in between two
requests.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from attrs import evolve, frozen

from vla_rl.core.errors import PluginError
from vla_rl.core.hookspecs import PolicyEngine, VLAModel
from vla_rl.core.types import Array

ALIGNED = 64
"""Alignment of each tensor's start, in bytes."""


@frozen(kw_only=True)
class _SentTensor:
    """Description of one tensor in the memory of a version."""

    name: str
    start: int
    """Offset of the tensor's bytes in the memory of the version."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: int | None

    def read(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of that memory, uint8 [bytes]."""
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        return memory[self.start : end].view(self.dtype).view(self.shape)


@frozen(kw_only=True)
class PublishedWeights:
    """The trainable weights of one version, in one array, which Ray copies fastest."""

    version: int
    memory: Array
    """uint8 [bytes]."""
    tensors: tuple[_SentTensor, ...]


class WeightPublisher:
    """Copies weights into host memory that it reuses: a version is valid until the next one is published."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def publish(self, model: VLAModel, version: int, check: bool) -> PublishedWeights:
        """Return the weights as `receive` takes them, with checksums if `check`."""
        pairs = list(model.weights())
        starts = [0]
        for _, tensor in pairs:
            starts.append(-(-(starts[-1] + tensor.nbytes) // ALIGNED) * ALIGNED)
        if len(self.memory) != starts[-1]:
            self.memory = torch.zeros(starts[-1], dtype=torch.uint8)
        sent = []
        for start, (name, tensor) in zip(starts, pairs, strict=False):
            one = _SentTensor(name=name, start=start, dtype=tensor.dtype, shape=tuple(tensor.shape), checksum=None)
            target = one.read(self.memory)
            target.copy_(tensor)
            sent.append(evolve(one, checksum=_checksum(target)) if check else one)
        return PublishedWeights(version=version, memory=self.memory.numpy(), tensors=tuple(sent))


Weights = list[tuple[str, torch.Tensor]]


def receive(model: VLAModel | None, published: PublishedWeights) -> Weights:
    """Copy a version to the model's device without changing the model. Without a model in this process, return it in
    host memory. Raises PluginError naming the parameter where names, shapes or types differ.
    """
    memory = torch.from_numpy(published.memory)
    received = [(sent.name, sent.read(memory)) for sent in published.tensors]
    if model is None:
        return received
    current = dict(model.weights())
    _compare(current, dict(received), published.version)
    return [(name, tensor.to(current[name].device)) for name, tensor in received]


def swap_in(engine: PolicyEngine, received: Weights, published: PublishedWeights) -> None:
    """Load what was received. Raises PluginError naming the parameter where a version has checksums and the engine's
    model then does not hold the weights that were sent.
    """
    engine.load(received)
    if engine.model is None or all(sent.checksum is None for sent in published.tensors):
        return
    memory = torch.from_numpy(published.memory)
    held = dict(engine.model.weights())
    for sent in published.tensors:
        if sent.checksum is not None and _checksum(held[sent.name]) != sent.checksum:
            differing = int((held[sent.name].cpu() != sent.read(memory)).sum())
            raise PluginError(
                f"parameter {sent.name!r} of version {published.version} is not what the learner sent: {differing} of "
                f"its {math.prod(sent.shape)} numbers differ (runtime.check_weights); look at the model's "
                f"load_weights, and at wrappers around it"
            )


def _checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bits."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _compare(current: Mapping[str, torch.Tensor], received: Mapping[str, torch.Tensor], version: int) -> None:
    """Raises PluginError where a version does not fit the model."""
    for name in sorted(current.keys() | received.keys()):
        held = _description(current.get(name))
        sent = _description(received.get(name))
        if held != sent:
            raise PluginError(
                f"parameter {name!r} of version {version} does not fit: the learner sent {sent}, the policy holds "
                f"{held}; both are built from one spec, so look at the model's weights(), and at wrappers around it"
            )


def _description(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
