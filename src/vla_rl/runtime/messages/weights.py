"""What the two ends of a weight transfer agree on once, when a run starts."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping

import torch
from attrs import frozen

from vla_rl.core.errors import PluginError
from vla_rl.core.spec.sections import WeightStrategy

ALIGNMENT = 64
"""Alignment of each tensor's start, in bytes."""


@frozen(kw_only=True)
class TensorLayout:
    """One tensor's position in the memory of a version."""

    name: str
    start: int
    """Offset of the tensor's bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Return the tensor as a view of memory, uint8 [bytes], whose first byte is byte `offset` of the version."""
        start = self.start - offset
        return memory[start : start + self.nbytes].view(self.dtype).view(self.shape)


@frozen(kw_only=True)
class Bucket:
    """Consecutive tensors that travel together."""

    start: int
    end: int
    """First byte of the bucket in the memory of a version, and the first byte after it."""
    tensors: tuple[TensorLayout, ...]

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def named_views(self, memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return (name, view) of each tensor in the bucket's memory, uint8 [bytes]."""
        return [(tensor.name, tensor.view(memory, self.start)) for tensor in self.tensors]


@frozen(kw_only=True)
class WeightLayout:
    """Names, types, shapes and positions of all published tensors, in publishing order."""

    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return self.buckets[-1].end

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest bucket."""
        return max(bucket.nbytes for bucket in self.buckets)

    @property
    def tensors(self) -> tuple[TensorLayout, ...]:
        return tuple(tensor for bucket in self.buckets for tensor in bucket.tensors)

    @classmethod
    def of_weights(cls, pairs: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> WeightLayout:
        """Return the layout of a model's weights, in buckets of at most this size; a larger tensor has its own."""
        buckets: list[Bucket] = []
        tensors: list[TensorLayout] = []
        bucket_start = end = 0
        for name, tensor in pairs:
            one = TensorLayout(name=name, start=end, dtype=tensor.dtype, shape=tuple(tensor.shape))
            if tensors and end + one.nbytes - bucket_start > bucket_bytes:
                buckets.append(Bucket(start=bucket_start, end=end, tensors=tuple(tensors)))
                tensors = []
                bucket_start = end
            tensors.append(one)
            end += -(-one.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(buckets=(*buckets, Bucket(start=bucket_start, end=end, tensors=tuple(tensors))))

    def check_layout(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise PluginError naming the parameter where the weights of a policy do not have this layout."""
        sent = {tensor.name: describe_tensor(tensor) for tensor in self.tensors}
        held = {name: describe_tensor(tensor) for name, tensor in weights}
        for name in sorted(sent.keys() | held.keys()):
            if sent.get(name) != held.get(name):
                raise PluginError(
                    f"parameter {name!r} does not fit: the learner sends {sent.get(name, 'nothing')}, the policy holds "
                    f"{held.get(name, 'nothing')}; both are built from one spec, so look at the model's weights(), and "
                    f"at wrappers around it"
                )


@frozen(kw_only=True)
class WeightTransfer:
    """A transfer's ends, strategy and layout."""

    strategy: WeightStrategy
    through_store: bool
    """Versions travel through Ray's object store: policies are on other machines (strategy `host`)."""
    layout: WeightLayout
    address: str
    """Address of the learner's listening socket, where the ends meet; "" with `through_store`."""
    learner: int
    """Worker that sends: rank 0 of the transfer."""
    policies: tuple[int, ...]
    """Workers that receive: ranks 1, 2, ..."""
    deadline_s: float


def describe_tensor(tensor: torch.Tensor | TensorLayout) -> str:
    """Return shape and type of a tensor as text."""
    return f"{list(tensor.shape)} {tensor.dtype}"


def compute_checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bits."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def verify_checksums(weights: Iterable[tuple[str, torch.Tensor]], checksums: Mapping[str, int], version: int) -> None:
    """Raise PluginError naming the parameter where a model does not hold the weights that were sent."""
    held = dict(weights)
    for name, wanted in checksums.items():
        if compute_checksum(held[name]) != wanted:
            raise PluginError(
                f"parameter {name!r} of version {version} is not what the learner sent (runtime.check_weights); look "
                f"at the model's load_weights, and at wrappers around it"
            )
