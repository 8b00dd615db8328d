"""Parallel strategies of several learners: full replicas of the model here, shards in `fsdp.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vla_rl.core.spec.sections import TrainSpec
from vla_rl.toolkit.trainers.parallel import ParallelStrategy, SingleRank


class DataParallel(ParallelStrategy):
    """Data parallelism: the full model on every rank."""

    def __init__(self, world: int) -> None:
        self.world = world

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """All-reduce in one flat buffer; a rank without samples adds zeros."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in grads])
        torch.distributed.all_reduce(flat)
        start = 0
        for parameter, grad in zip(parameters, grads, strict=True):
            grad.copy_(flat[start : start + grad.numel()].view_as(grad))
            parameter.grad = grad
            start += grad.numel()


def strategy_for(train: TrainSpec, device: str, world: int) -> ParallelStrategy:
    """Return the strategy of `world` learners, not yet prepared; a single learner never shards its model."""
    if world == 1:
        return SingleRank()
    if train.sharding == "full":
        from vla_rl.runtime.workers.learner.parallel.fsdp import FullyShardedParallel  # loads for a second

        return FullyShardedParallel(device, world)
    return DataParallel(world)
