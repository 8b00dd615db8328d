"""A stand-in for the recorder of CUDA graphs, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

HOST_READS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount"}
)
"""Operators whose result, or its shape, depends on values, so that the host waits for the device."""
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
"""Operators that are host reads with a mask among the indices."""


class EagerRecorder:
    """Repeats a function on the same buffers without a graph, as a stand-in on a CPU. Refuses host reads as a graph
    does."""

    def record_function(self, run: Callable[[], None]) -> Callable[[], None]:
        with no_host_reads():
            run()
        return run


class _HostReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name in INDEXING and any(part is not None and part.dtype == torch.bool for part in args[1])
        if name in HOST_READS or masked:
            raise RuntimeError(f"{func} reads values of a tensor on the host, which a CUDA graph cannot do")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Context that raises RuntimeError for an operator that lets the host read a tensor's values."""
    with _HostReads():
        yield
