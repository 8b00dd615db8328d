"""Interface of a parallel strategy, and data parallelism: a full replica on each rank. `fsdp.py` has the sharded one.

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
    """Strategy by which the ranks hold the model, run it and reduce its gradients."""

    lockstep: bool
    """True where all ranks have to run every forward and backward pass together."""

    def run(self, forward: Callable[[], T]) -> T:
        """Call the model; the result is a tensor or a dict of tensors."""

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all ranks."""

    def gather(self) -> None:
        """Put full weights into the module, for use outside `run`; all ranks together."""

    def release(self) -> None:
        """Undo `gather`."""

    def full_weights(self) -> AbstractContextManager[None]:
        """Context in which the released module holds full weights, to be saved or sent; all ranks together."""

    def unsharded(self, tensor: Any) -> Any:
        """Return a tensor that may be sharded as a full tensor on its device; all ranks together. Other values are
        returned unchanged.
        """

    def full_tensor(self, tensor: Any) -> Any:
        """Return `unsharded` in host memory."""

    def local_shard(self, tensor: Any, like: torch.Tensor) -> Any:
        """Return this rank's shard of a full tensor, sharded as the parameter `like`. Other values are returned
        unchanged.
        """


class DataParallel:
    """Data parallelism: the full model on every rank."""

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
        """Do nothing: the weights are full."""

    def release(self) -> None:
        """Do nothing: the weights stay full."""

    def full_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def unsharded(self, tensor: Any) -> Any:
        return tensor

    def full_tensor(self, tensor: Any) -> Any:
        return on_host(tensor)

    def local_shard(self, tensor: Any, like: torch.Tensor) -> Any:
        return tensor


def on_host(value: Any) -> Any:
    """Return a tensor detached and in host memory; other values unchanged."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
