"""Detection of host reads: operations for which the host waits for the device."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
OPERATORS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.unique_dim,
    aten.unique_consecutive,
    aten._unique2,
    aten.equal,
    aten.is_nonzero,
}
"""Operators whose result, or whose result's shape, the host has to know."""
METHODS = {torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class _Operators(TorchDispatchMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        by_mask = packet in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if packet in OPERATORS or by_mask:
            self._reads.append(_located(str(func)))
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_host = func is torch.Tensor.to and "cpu" in [x for x in (*args[1:], *kwargs.values()) if isinstance(x, str)]
        if func in METHODS or to_host:
            self._reads.append(_located(func.__name__))
        return func(*args, **kwargs)


def _located(name: str) -> str:
    """Return the operation with the last lines of the call stack in the package."""
    frames = [
        f"{f.filename.rpartition('/vla_rl/')[2]}:{f.lineno}"
        for f in traceback.extract_stack()
        if "torch" not in f.filename
    ]
    return f"{name} at {' < '.join(reversed(frames[-5:-1]))}"


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Context that yields a list of the host reads in it."""
    reads: list[str] = []
    with _Operators(reads), _Methods(reads):
        yield reads
