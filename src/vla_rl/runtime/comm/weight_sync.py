"""Weights on their way from a learner to policies in other processes.

A version travels whole, as the bits of every trainable tensor, through Ray's object store: copied into it once, and
read where it lies by all policies of a node. A policy puts it on its device while it acts, and swaps it in between two
requests.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from attrs import evolve, frozen

from vla_rl.core.errors import PluginError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.types import Array

ALIGNED = 64
"""Bytes at which each tensor starts."""


@frozen(kw_only=True)
class _Sent:
    """One tensor."""

    name: str
    start: int
    """Of its bytes in the memory of all."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: int | None

    def read(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in that memory, uint8 [bytes]."""
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        return memory[self.start : end].view(self.dtype).view(self.shape)


@frozen(kw_only=True)
class PublishedWeights:
    """The trainable weights of one version, in one piece, which Ray copies fastest."""

    version: int
    memory: Array
    """uint8 [bytes]."""
    tensors: tuple[_Sent, ...]


class WeightPublisher:
    """Copies weights into host memory that it keeps: what it gives out is good until the next version."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def publish(self, model: VLAModel, version: int, check: bool) -> PublishedWeights:
        """What `receive` takes, with checksums if asked for."""
        pairs = list(model.weights())
        starts = [0]
        for _, tensor in pairs:
            starts.append(-(-(starts[-1] + tensor.nbytes) // ALIGNED) * ALIGNED)
        if len(self.memory) != starts[-1]:
            self.memory = torch.zeros(starts[-1], dtype=torch.uint8)
        sent = []
        for start, (name, tensor) in zip(starts, pairs, strict=False):
            one = _Sent(name=name, start=start, dtype=tensor.dtype, shape=tuple(tensor.shape), checksum=None)
            target = one.read(self.memory)
            target.copy_(tensor)
            sent.append(evolve(one, checksum=_checksum(target)) if check else one)
        return PublishedWeights(version=version, memory=self.memory.numpy(), tensors=tuple(sent))


Weights = list[tuple[str, torch.Tensor]]


def receive(model: VLAModel, published: PublishedWeights) -> Weights:
    """Put a version beside the model's, on its device; nothing changes. Raises PluginError naming the parameter where
    names, shapes or types differ."""
    memory = torch.from_numpy(published.memory)
    coming = [(sent.name, sent.read(memory)) for sent in published.tensors]
    own = dict(model.weights())
    _compare(own, dict(coming), published.version)
    return [(name, tensor.to(own[name].device)) for name, tensor in coming]


def swap_in(model: VLAModel, received: Weights, published: PublishedWeights) -> None:
    """Load what was received. Raises PluginError, for a version with checksums, naming the parameter where the model
    then does not hold what was sent."""
    model.load_weights(received)
    if all(sent.checksum is None for sent in published.tensors):
        return
    memory, held = torch.from_numpy(published.memory), dict(model.weights())
    for sent in published.tensors:
        if sent.checksum is not None and _checksum(held[sent.name]) != sent.checksum:
            differing = int((held[sent.name].cpu() != sent.read(memory)).sum())
            raise PluginError(
                f"parameter {sent.name!r} of version {published.version} is not what the learner sent: {differing} of "
                f"its {math.prod(sent.shape)} numbers differ (runtime.check_weights); look at the model's "
                f"load_weights, and at wrappers around it"
            )


def _checksum(tensor: torch.Tensor) -> int:
    """Of the bits."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _compare(own: Mapping[str, torch.Tensor], coming: Mapping[str, torch.Tensor], version: int) -> None:
    """Raises PluginError where a version does not fit the model."""
    here, there = ({name: (list(t.shape), t.dtype) for name, t in side.items()} for side in (own, coming))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            got, want = (f"{of[name][0]} {of[name][1]}" if name in of else "nothing" for of in (there, here))
            raise PluginError(
                f"parameter {name!r} of version {version} does not fit: the learner sent {got}, the policy holds "
                f"{want}; both are built from one spec, so look at the model's weights(), and at wrappers around it"
            )
