"""Bytes of the tensors that are alive, counted operator by operator, also on the meta device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

BLOCK = 512
"""Bytes to which CUDA's allocator rounds up what a tensor needs."""


class LiveMemory(TorchDispatchMode):
    """Mode that counts the storages which operators allocate inside it, on one type of device, until they are freed.

    The count is what `torch.cuda.memory_allocated` shows for the same tensors. What a kernel allocates for itself, and
    what the allocator keeps beyond that, is not in it.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.device = device
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """Most bytes that were alive at once since `restart`."""
        self._alive: set[int] = set()

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.device.type == self.device:
                self._count(value)
        return result

    def _count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, unless it is alive already."""
        storage = tensor.untyped_storage()
        address = storage._cdata  # noqa: SLF001 - identifies a storage, as in torch.multiprocessing
        if address in self._alive:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._alive.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, address, size)

    def _free(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.now -= size
