"""Adapters cast to bfloat16 once for all passes of an optimiser step, instead of at every use. Needs no peft.

Autocast casts a float32 weight wherever it is used, and again where activations are recomputed. For the hundreds of
small adapters of a large network these casts are most of the launches that are not arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vla_rl.toolkit.models.adapters import TRAINED

DTYPE = torch.bfloat16
"""Type to which autocast casts."""


class _CastAll(torch.autograd.Function):
    """Casts many tensors at once, and their gradients back. It saves nothing: a cast serves several backward passes."""

    @staticmethod
    def forward(ctx: Any, *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a weight without gradient stays without one
        return tuple(_cast_tensors(masters, DTYPE))

    @staticmethod
    @once_differentiable
    def backward(_: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wide = iter(_cast_tensors([gradient for gradient in gradients if gradient is not None], torch.float32))
        return tuple(None if gradient is None else next(wide) for gradient in gradients)


def _cast_tensors(tensors: Any, dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


@contextmanager
def adapters_cast_once(module: nn.Module) -> Iterator[None]:
    """Context in which adapters that autocast would cast are used as one bfloat16 copy, with equal results and
    gradients. The float32 weights stay the module's parameters and get the gradients; they may not change inside, and
    backward passes belong inside too.

    That holds for compiled layers too: the compiler makes a kernel of each weight's cast.
    """
    parts = list(_cast_parts(module))
    copies = _CastAll.apply(*[part.weight for part in parts]) if parts else ()  # type: ignore[no-untyped-call]
    try:
        for part, copy in zip(parts, copies, strict=True):
            part.__dict__["weight"] = copy  # found before the parameter of this name, which stays registered
        yield
    finally:
        for part in parts:
            part.__dict__.pop("weight", None)


def _cast_parts(module: nn.Module) -> Iterator[Any]:
    """Yield the linear layers of adapters whose float32 weights autocast casts: those that peft leaves to it."""
    for module_part in module.modules():
        layer: Any = module_part
        if getattr(layer, "cast_input_dtype_enabled", True):
            continue
        for part in (layer.lora_A[TRAINED], layer.lora_B[TRAINED]):
            if type(part.weight) is nn.Parameter and part.weight.dtype == torch.float32:  # no shard
                yield part
