"""The two ends of a weight transfer. A version travels bucket by bucket; the receiver hands the tensors of one bucket
to the model while the next one is under way, so it never holds a second copy of all weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch

from vla_rl.core.errors import PluginError
from vla_rl.core.types import Array
from vla_rl.runtime.comm.weight_transfer.link import TransferLink
from vla_rl.runtime.messages.weights import TensorLayout, WeightLayout, compute_checksum, describe_tensor

Pair = tuple[str, torch.Tensor]


class WeightSender(ABC):
    """The learner's end."""

    def __init__(self, layout: WeightLayout) -> None:
        self.layout = layout

    def send_version(self, pairs: Iterable[Pair], check: bool) -> tuple[Array | None, dict[str, int]]:
        """Send one version: full tensors in publishing order, each used before the next is taken.

        Returns: (the version's memory, uint8 [bytes], where the runtime has to pass it on; checksums by name if
        `check`). Raises PluginError for weights that changed since the start, WorkerDied, CallHung.
        """
        checksums: dict[str, int] = {}
        left = iter(pairs)
        self.begin_version()
        for index, bucket in enumerate(self.layout.buckets):
            memory = self.bucket_memory(index)
            for (name, target), expected in zip(bucket.named_views(memory), bucket.tensors, strict=True):
                target.copy_(_next_tensor(left, expected))
                if check:
                    checksums[name] = compute_checksum(target)
            self.dispatch_bucket(index)
        return self.finish_version(), checksums

    @abstractmethod
    def begin_version(self) -> None:
        """Prepare for a version."""

    @abstractmethod
    def bucket_memory(self, index: int) -> torch.Tensor:
        """Return memory for a bucket, uint8 [bytes], once it may be overwritten."""

    @abstractmethod
    def dispatch_bucket(self, index: int) -> None:
        """Send a bucket, whose memory is filled."""

    @abstractmethod
    def finish_version(self) -> Array | None:
        """Wait until the weights may change. Return memory that the runtime has to pass on, or None."""


class WeightReceiver(ABC):
    """A policy's end."""

    def __init__(self, layout: WeightLayout) -> None:
        self.layout = layout

    @abstractmethod
    def wait_for_version(self, memory: Array | None) -> None:
        """Wait until the sender has begun with a version. `memory`: of `send_version`, if the runtime passes it."""

    def named_tensors(self) -> Iterator[Pair]:
        """Yield (name, tensor) of the version. A tensor is valid until the whole version is loaded."""
        for index, bucket in enumerate(self.layout.buckets):
            yield from bucket.named_views(self.receive_bucket(index))

    @abstractmethod
    def receive_bucket(self, index: int) -> torch.Tensor:
        """Wait for a bucket. Return its memory, uint8 [bytes]."""


class LinkSender(WeightSender):
    """The learner's end of a transfer whose ends signal each other."""

    def __init__(self, link: TransferLink) -> None:
        super().__init__(link.transfer.layout)
        self.link = link

    def begin_version(self) -> None:
        self.link.begin_next_version()


class LinkReceiver(WeightReceiver):
    """A policy's end of a transfer whose ends signal each other."""

    def __init__(self, link: TransferLink) -> None:
        super().__init__(link.transfer.layout)
        self.link = link

    def wait_for_version(self, memory: Array | None) -> None:
        self.link.begin_next_version()
        self.link.wait_ready(0)


def _next_tensor(left: Iterator[Pair], expected: TensorLayout) -> torch.Tensor:
    name, tensor = next(left, ("", None))
    if tensor is None or (name, describe_tensor(tensor)) != (expected.name, describe_tensor(expected)):
        sent = "nothing" if tensor is None else f"{name!r} {describe_tensor(tensor)}"
        raise PluginError(
            f"the model's weights() gives {sent}, and at the start of the run it gave {expected.name!r} "
            f"{describe_tensor(expected)}; names, shapes and types have to stay"
        )
    return tensor
