"""Memory of activations: bytes that a forward pass keeps for its backward pass, also on the meta device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _NewStorages(TorchDispatchMode):
    """Mode that records the storages which operators allocate inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._seen: set[StorageWeakRef] = set()
        """Storages of all tensors so far; a weak reference keeps an address from being used again."""
        self._sizes: dict[StorageWeakRef, int] = {}
        """New storages -> bytes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.update(_storages((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for storage, size in _storages(result).items():  # views and operators in place return a storage that was seen
            if storage not in self._seen:
                self._seen.add(storage)
                self._sizes[storage] = size
        return result

    def living_bytes(self) -> int:
        """Return the bytes of the new storages that something still refers to."""
        return sum(size for storage, size in self._sizes.items() if not storage.expired())


def _storages(tree: Any) -> dict[StorageWeakRef, int]:
    """Return the storages of all tensors in nested containers, with their bytes."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


def saved_bytes(forward: Callable[[], Any]) -> int:
    """Return the bytes that are allocated inside `forward` and alive at its end, while its result is.

    These are the tensors that autograd saves, those that selective recomputation keeps, and the result. Each storage
    counts once, however many tensors share it. Parameters and inputs exist before and do not count. Copies of
    parameters do, such as those that autocast makes: take the difference of two batch sizes for the bytes of a sample.

    Args:
        forward: a forward pass with gradient; its tensors may be on the meta device or fake ones, which take no memory.
            Attention on the plain meta device has no fused kernel and saves its matrix; that of fake tensors has.
    """
    storages = _NewStorages()
    with storages:
        result = forward()
    gc.collect()  # what only cycles keep is not needed
    size = storages.living_bytes()
    del result
    return size
