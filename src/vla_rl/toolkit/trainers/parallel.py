"""Contract of parallel strategies, and the one of a single rank. `runtime/workers/learner/parallel` has the others. All
give exact sums: gradients of ranks are added, never averaged, since a loss is divided by the counts of all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import EnvInfo

T = TypeVar("T")


class ParallelStrategy(ABC):
    """How the ranks hold a model, run it and reduce its gradients. Methods here are of full replicas."""

    world: int
    """Number of ranks."""
    lockstep: bool = False
    """True where all ranks have to run every forward and backward pass together."""
    mesh: Any = None
    """`torch.distributed.device_mesh.DeviceMesh` of the ranks, where the strategy shards the model; else None."""

    def prepare_model(self, model: VLAModel, info: EnvInfo) -> ModelInputs | None:
        """Arrange a model with equal weights; all ranks together. Return a sample for dummy batches, if in lockstep."""
        return None

    def run(self, forward: Callable[[], T]) -> T:
        """Call the model; the result is a tensor, or a tuple or dict of tensors."""
        return forward()

    @abstractmethod
    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all ranks."""

    def gather_weights(self) -> None:  # noqa: B027 - full weights need nothing
        """Put full weights into the module, for use outside `run`; all ranks together."""

    def release_weights(self) -> None:  # noqa: B027 - full weights stay
        """Undo `gather_weights`."""

    def full_weights(self) -> AbstractContextManager[None]:
        """Context in which the released module holds full weights, to be saved or sent; all ranks together."""
        return nullcontext()

    def unshard_tensor(self, tensor: Any) -> Any:
        """Return a tensor, maybe sharded, as a full one on its device; all ranks together. Other values stay."""
        return tensor

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that may be sharded, as a plain tensor."""
        return tensor

    def full_tensor(self, tensor: Any) -> Any:
        """Return `unshard_tensor` in host memory."""
        return on_host(self.unshard_tensor(tensor))

    def local_shard(self, tensor: Any, like: torch.Tensor) -> Any:
        """Return this rank's shard of a full tensor, sharded as the parameter `like`. Other values stay."""
        return tensor


class SingleRank(ParallelStrategy):
    """No parallelism: one learner, which holds the whole model."""

    world = 1

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing: there are no other ranks."""


def on_host(value: Any) -> Any:
    """Return a tensor detached and in host memory; other values unchanged."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def sharding_problem() -> str | None:
    """Return why the installed torch cannot shard weights, or None if it can."""
    from torch.distributed.fsdp import FSDPModule  # takes a second to load

    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return None
    return (
        f"needs torch 2.13 or newer, whose FSDP2 reduces gradients that only some ranks have; {torch.__version__} is "
        f"installed; use train.sharding: replicated, or install a newer torch"
    )
