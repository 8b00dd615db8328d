"""Strategy `ipc`: processes on one CUDA device. The sender fills two buckets in turn, and the receivers have their
memory mapped (CUDA IPC), so weights never leave the device."""

from __future__ import annotations

import pickle

import torch

from vla_rl.core.errors import UserError, first_line
from vla_rl.runtime.comm.weight_transfer.ends import LinkReceiver, LinkSender
from vla_rl.runtime.comm.weight_transfer.link import TransferLink

HANDLES = "handles"
"""Key of the store under which receivers find the buckets."""
BUCKETS = 2
DEVICE_ARGUMENT = 6
"""Position of the device's number in the arguments of torch's `rebuild_cuda_tensor`."""
ADVICE = "set placement.weight_transfer to nccl (a device for each role) or host"


class IpcSender(LinkSender):
    """The learner's end."""

    def __init__(self, link: TransferLink, device: torch.device) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        super().__init__(link)
        self._memory = [
            torch.empty(self.layout.largest_bytes, dtype=torch.uint8, device=device) for _ in range(BUCKETS)
        ]
        try:
            handles = [reduce_tensor(memory) for memory in self._memory]
        except RuntimeError as exc:
            raise UserError(f"CUDA cannot share memory of this process: {first_line(exc)}; {ADVICE}") from exc
        with link.translate_errors("connecting"):
            link.store.set(HANDLES, pickle.dumps(handles))

    def bucket_memory(self, index: int) -> torch.Tensor:
        if index >= BUCKETS:
            self.link.wait_taken(index - BUCKETS)
        return self._memory[index % BUCKETS][: self.layout.buckets[index].nbytes]

    def dispatch_bucket(self, index: int) -> None:
        torch.cuda.current_stream().synchronize()
        self.link.set_ready(index)

    def finish_version(self) -> None:
        count = len(self.layout.buckets)
        for index in range(max(0, count - BUCKETS), count):
            self.link.wait_taken(index)


class IpcReceiver(LinkReceiver):
    """A policy's end."""

    def __init__(self, link: TransferLink, device: torch.device) -> None:
        super().__init__(link)
        self.device = device
        with link.translate_errors("connecting"):
            handles = pickle.loads(link.store.get(HANDLES))  # noqa: S301 - from our own learner
        try:
            self._memory = [_open_mapped_tensor(rebuild, list(arguments), device) for rebuild, arguments in handles]
        except RuntimeError as exc:
            raise UserError(f"CUDA cannot map the learner's memory: {first_line(exc)}; {ADVICE}") from exc

    def receive_bucket(self, index: int) -> torch.Tensor:
        self.link.wait_ready(index)
        bucket = self._memory[index % BUCKETS][: self.layout.buckets[index].nbytes].clone()
        torch.cuda.current_stream().synchronize()
        self.link.set_taken(index)
        return bucket


def _open_mapped_tensor(rebuild: object, arguments: list[object], device: torch.device) -> torch.Tensor:
    """Return the mapped tensor. Each process counts its devices by itself."""
    assert callable(rebuild)
    arguments[DEVICE_ARGUMENT] = torch.cuda.current_device() if device.index is None else device.index
    tensor: torch.Tensor = rebuild(*arguments)
    return tensor
