"""Strategy `host`: weights travel through host memory, which works everywhere.

The sender has one copy of a version in host memory. On one machine, the receivers map that memory and follow the sender
bucket by bucket. Between machines the copy goes through Ray's object store. The sender never waits for a receiver: the
driver begins with the next version once all policies hold this one.
"""

from __future__ import annotations

import os
from mmap import mmap

import torch

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.runtime.comm.weight_transfer.ends import LinkReceiver, LinkSender, WeightReceiver, WeightSender
from vla_rl.runtime.comm.weight_transfer.link import TransferLink
from vla_rl.runtime.messages.weights import WeightLayout

PATH = "memory"
"""Key of the store under which receivers find the sender's memory."""


class StoreSender(WeightSender):
    """The learner's end of a transfer through Ray's object store, which copies the version from this memory."""

    def __init__(self, layout: WeightLayout) -> None:
        super().__init__(layout)
        self.version = torch.zeros(layout.nbytes, dtype=torch.uint8)

    def begin_version(self) -> None:
        """Do nothing: the memory of the last version is free."""

    def bucket_memory(self, index: int) -> torch.Tensor:
        bucket = self.layout.buckets[index]
        return self.version[bucket.start : bucket.end]

    def dispatch_bucket(self, index: int) -> None:
        """Do nothing: the version travels as a whole."""

    def finish_version(self) -> Array:
        array: Array = self.version.numpy()
        return array


class StoreReceiver(WeightReceiver):
    """A policy's end of a transfer through Ray's object store."""

    version: torch.Tensor

    def wait_for_version(self, memory: Array | None) -> None:
        assert memory is not None
        self.version = torch.from_numpy(memory)

    def receive_bucket(self, index: int) -> torch.Tensor:
        bucket = self.layout.buckets[index]
        return self.version[bucket.start : bucket.end]


class HostSender(LinkSender):
    """The learner's end on one machine. The memory has no name in the file system, so it ends with the processes."""

    def __init__(self, link: TransferLink) -> None:
        super().__init__(link)
        size = self.layout.nbytes
        self._file = os.memfd_create("vla-rl-weights")
        try:
            os.posix_fallocate(self._file, 0, size)  # a write to missing memory would end the process instead
        except OSError as exc:
            raise UserError(
                f"host memory for one version of the weights ({size / 2**30:.2f} GiB) cannot be had: {exc.strerror}; "
                f"free memory of this machine"
            ) from exc
        self._version = torch.frombuffer(mmap(self._file, size), dtype=torch.uint8)
        with link.translate_errors("connecting"):
            link.store.set(PATH, f"/proc/{os.getpid()}/fd/{self._file}")

    def bucket_memory(self, index: int) -> torch.Tensor:
        bucket = self.layout.buckets[index]
        return self._version[bucket.start : bucket.end]

    def dispatch_bucket(self, index: int) -> None:
        self.link.set_ready(index)

    def finish_version(self) -> None:
        """Do nothing: receivers read a copy."""


class HostReceiver(LinkReceiver):
    """A policy's end on one machine."""

    def __init__(self, link: TransferLink) -> None:
        super().__init__(link)
        with link.translate_errors("connecting"):
            path = link.store.get(PATH).decode()
        file = os.open(path, os.O_RDWR)
        self._version = torch.frombuffer(mmap(file, self.layout.nbytes), dtype=torch.uint8)
        os.close(file)

    def receive_bucket(self, index: int) -> torch.Tensor:
        self.link.wait_ready(index)
        bucket = self.layout.buckets[index]
        return self._version[bucket.start : bucket.end]
