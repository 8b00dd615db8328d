"""Strategy `nccl`: a collective broadcast from device to device, in buckets, by a process group of the first learner
and the policies. Between CUDA devices the group is NCCL's, between CPUs gloo's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from vla_rl.runtime.comm.weight_transfer.ends import LinkReceiver, LinkSender
from vla_rl.runtime.comm.weight_transfer.link import TransferLink

IN_FLIGHT = 2
"""Buckets that are filled, sent or received at the same time."""


class Broadcast:
    """Process group of a transfer. It is not the default group, so learners keep theirs."""

    def __init__(self, link: TransferLink, device: torch.device) -> None:
        self.link = link
        self.device = device
        self._works: dict[int, Any] = {}
        """Bucket -> its broadcast that runs."""
        store = dist.PrefixStore("weights", link.store)  # type: ignore[attr-defined]
        with link.translate_errors("connecting"):
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = link.timeout  # noqa: SLF001 - as torch's own `new_group` does
                self.group: Any = dist.ProcessGroupNCCL(store, link.rank, link.world, options)
            else:
                self.group = dist.ProcessGroupGloo(store, link.rank, link.world, link.timeout)

    def allocate_bucket(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def start_broadcast(self, index: int, memory: torch.Tensor) -> None:
        """Begin to broadcast a bucket from rank 0; all ranks begin with the buckets in the same order."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with self.link.translate_errors(self._activity_text):
            self._works[index] = self.group.broadcast([memory], options)

    def wait_for_broadcast(self, index: int) -> None:
        """Wait for a bucket's broadcast, on the host."""
        with self.link.translate_errors(self._activity_text):
            self._works.pop(index).wait(self.link.timeout)

    @property
    def _activity_text(self) -> str:
        return "receiving weights" if self.link.rank else "sending weights"


class CollectiveSender(LinkSender):
    """The learner's end."""

    def __init__(self, link: TransferLink, device: torch.device) -> None:
        super().__init__(link)
        self.broadcast = Broadcast(link, device)
        self._memory = [self.broadcast.allocate_bucket(self.layout.largest_bytes) for _ in range(IN_FLIGHT)]

    def begin_version(self) -> None:
        super().begin_version()
        self.link.set_ready(0)

    def bucket_memory(self, index: int) -> torch.Tensor:
        if index >= IN_FLIGHT:
            self.broadcast.wait_for_broadcast(index - IN_FLIGHT)
        return self._memory[index % IN_FLIGHT][: self.layout.buckets[index].nbytes]

    def dispatch_bucket(self, index: int) -> None:
        self.broadcast.start_broadcast(index, self._memory[index % IN_FLIGHT][: self.layout.buckets[index].nbytes])

    def finish_version(self) -> None:
        count = len(self.layout.buckets)
        for index in range(max(0, count - IN_FLIGHT), count):
            self.broadcast.wait_for_broadcast(index)


class CollectiveReceiver(LinkReceiver):
    """A policy's end."""

    def __init__(self, link: TransferLink, device: torch.device) -> None:
        super().__init__(link)
        self.broadcast = Broadcast(link, device)
        self._expected: dict[int, torch.Tensor] = {}
        """Bucket -> memory that it arrives in. Each has its own: a model may keep tensors until all are loaded."""

    def receive_bucket(self, index: int) -> torch.Tensor:
        for following in range(index, min(index + IN_FLIGHT, len(self.layout.buckets))):
            if following not in self._expected:
                self._expected[following] = self.broadcast.allocate_bucket(self.layout.buckets[following].nbytes)
                self.broadcast.start_broadcast(following, self._expected[following])
        self.broadcast.wait_for_broadcast(index)
        return self._expected.pop(index)
