"""AdamW over the trainable parameters of actor and critic, each with a learning rate of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vla_rl.core.errors import UserError
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.runtime.workers.learner.parallel.data_parallel import ParallelStrategy


def built(actor: Sequence[nn.Parameter], critic: Sequence[nn.Parameter], train: TrainSpec) -> torch.optim.AdamW:
    """On a CPU in one pass over weights and moments, which is several times faster than PyTorch's default there."""
    groups = [{"params": actor}, *([{"params": critic}] if critic else [])]  # rates are set by each update
    plain = all(type(p) is nn.Parameter and p.device.type == "cpu" for p in (*actor, *critic))  # not shards
    return torch.optim.AdamW(groups, lr=train.lr, weight_decay=train.weight_decay, fused=plain or None)


def set_rates(optimizer: torch.optim.Optimizer, train: TrainSpec, factor: float) -> None:
    """Those of a training step of reinforcement learning."""
    rates = (train.lr, train.lr if train.value_lr is None else train.value_lr)
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate * factor


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    group: ParallelStrategy,
    limit: float | None,
    loss: torch.Tensor,
    model: str,
    where: str,
) -> float:
    """Add up the gradients of all ranks, clip their norm to `limit`, and step. -> the norm. Raises UserError, that says
    which `model` and `where`, for one that is not finite; the weights are unchanged then."""
    group.reduce(parameters)
    norm = group.whole(torch.nn.utils.clip_grad_norm_(parameters, limit if limit is not None else float("inf")))
    if not bool(torch.isfinite(norm + loss)):
        raise UserError(
            f"the loss or gradient of model {model!r} is not finite in {where}; the weights are unchanged. Lower "
            f"train.lr or train.max_grad_norm, and look for extreme rewards or advantages"
        )
    optimizer.step()
    return float(norm)
