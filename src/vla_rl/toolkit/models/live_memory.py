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
    """Mode that counts the storages which operators allocate inside it until they are freed; not earlier tensors.

    The count is what `torch.cuda.memory_allocated` shows for the same tensors. What a kernel allocates for itself, and
    what the allocator keeps beyond that, is not in it.
    """

    def __init__(self, device: str | None = "meta", block: int = BLOCK) -> None:
        """Create the mode.

        Args:
            device: type of device whose tensors count; None: all.
            block: bytes to which the size of a storage is rounded up.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.device = device
        self.block = block
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """Most bytes that were alive at once since `restart_peak`."""
        self._alive: set[int] = set()

    def restart_peak(self) -> None:
        """Forget the peak."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs)):
            self._track_storage(value, is_new=False)
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            self._track_storage(value, is_new=True)
        return result

    def _track_storage(self, value: Any, is_new: bool) -> None:
        """Count the storage of a tensor unless it is known; one that is not new counts nothing."""
        if not isinstance(value, Tensor) or self.device not in (None, value.device.type):
            return
        storage = value.untyped_storage()
        address = storage._cdata  # noqa: SLF001 - identifies a storage, as in torch.multiprocessing
        if address in self._alive:
            return
        size = -(-storage.nbytes() // self.block) * self.block if is_new else 0
        self._alive.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free_storage, address, size)

    def _free_storage(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.now -= size
