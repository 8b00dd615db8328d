"""How the learners of a group hold one model: as replicas, or each a share of every tensor (`shards.py`).

Both give exact sums: gradients of all ranks are added, never averaged, since a loss is already divided by the counts of
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class ParallelStrategy(Protocol):
    """How a rank holds the model."""

    lockstep: bool
    """Every forward and backward pass is made by all ranks together."""

    def run(self, forward: Callable[[], T]) -> T:
        """Call the model; the result is a tensor or a dict of tensors."""

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all ranks."""

    def gather(self) -> None:
        """Put whole weights into the module, for use outside `run`; all ranks together."""

    def release(self) -> None:
        """Undo `gather`."""

    def whole_weights(self) -> AbstractContextManager[None]:
        """The module, released, holds whole weights meanwhile, to be saved or sent; all ranks together."""

    def whole(self, tensor: Any) -> Any:
        """A tensor that may be shared out, whole and in host memory; all ranks together. Other values as they are."""

    def share(self, tensor: Any, like: torch.Tensor) -> Any:
        """What this rank holds of a whole tensor, as it holds the parameter `like`. Other values as they are."""


class DataParallel:
    """The whole model on every rank."""

    lockstep = False

    def __init__(self, world: int) -> None:
        self.world = world

    def run(self, forward: Callable[[], T]) -> T:
        return forward()

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """All-reduce in one flat buffer; a rank without samples adds zeros."""
        if self.world == 1:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in grads])
        torch.distributed.all_reduce(flat)
        start = 0
        for parameter, grad in zip(parameters, grads, strict=True):
            grad.copy_(flat[start : start + grad.numel()].view_as(grad))
            parameter.grad = grad
            start += grad.numel()

    def gather(self) -> None:
        """They are whole."""

    def release(self) -> None:
        """They stay whole."""

    def whole_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def whole(self, tensor: Any) -> Any:
        return on_host(tensor)

    def share(self, tensor: Any, like: torch.Tensor) -> Any:
        return tensor


def on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
