"""Operators of a piece of code, counted as they run, also on the meta device: number, arithmetic, memory traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

Kind = Literal["product", "fp8_product", "attention", "other"]
WITHOUT_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"}
)
"""Operators that start nothing on a device, besides views."""


@frozen
class Operation:
    """An operator, by what decides how long a device takes."""

    kind: Kind
    """A product of matrices or a convolution; a product in FP8; attention; or else memory traffic."""
    flops: float
    """Floating-point operations."""
    traffic: float
    """Bytes that it reads and writes, each tensor once."""
    name: str = ""
    """torch's name of it, such as `mm`."""


@frozen(kw_only=True)
class OperationCounts:
    """Operators of a piece of code."""

    operations: Mapping[Operation, int]
    """Operator -> how often it ran."""
    module_calls: int
    """Calls of modules, each of which costs time on the host."""

    @property
    def total_flops(self) -> float:
        """Return all floating-point operations."""
        return sum(operation.flops * count for operation, count in self.operations.items())


class OperationCounter(TorchDispatchMode):
    """Mode that counts the operators inside it, forward and backward, and the calls of modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._operations: Counter[Operation] = Counter()
        self._module_calls = 0

    @property
    def operation_counts(self) -> OperationCounts:
        """Return what was counted since `restart_counts`."""
        return OperationCounts(operations=self._operations, module_calls=self._module_calls)

    def restart_counts(self) -> None:
        """Forget what was counted."""
        self._operations = Counter()
        self._module_calls = 0

    def __enter__(self) -> Self:
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._count_call)
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        self._hook.remove()

    def _count_call(self, module: nn.Module, inputs: object) -> None:
        self._module_calls += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in WITHOUT_KERNEL or name == "_unsafe_view":
            return result
        tensors = [value for value in tree_iter((args, kwargs, result)) if isinstance(value, Tensor)]
        if not any(tensor.is_meta or tensor.is_cuda for tensor in tensors):
            return result
        count_flops = flop_registry.get(func.overloadpacket)
        flops = 0.0 if count_flops is None else float(count_flops(*args, **kwargs, out_val=result))
        products: Kind = "attention" if "attention" in name else "fp8_product" if name == "_scaled_mm" else "product"
        kind: Kind = "other" if count_flops is None else products
        traffic = float(sum(_count_bytes(tensor) for tensor in tensors))
        self._operations[Operation(kind, flops, traffic, name)] += 1
        return result


def _count_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's values; those of an expanded one count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return int(torch.Size(sizes).numel()) * tensor.element_size()
