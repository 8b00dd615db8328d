"""AdamW over the trainable parameters of actor and critic, with separate learning rates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vla_rl.core.errors import UserError
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.runtime.workers.learner.parallel.data_parallel import ParallelStrategy


def build_optimizer(
    actor: Sequence[nn.Parameter], critic: Sequence[nn.Parameter], train: TrainSpec
) -> torch.optim.AdamW:
    """Return the optimiser. On a CPU it is the fused one, which passes once over weights and moments and is several
    times faster than PyTorch's default there.
    """
    groups = [{"params": actor}, *([{"params": critic}] if critic else [])]  # every update sets the learning rates
    on_cpu = all(type(p) is nn.Parameter and p.device.type == "cpu" for p in (*actor, *critic))  # False for shards
    return torch.optim.AdamW(groups, lr=train.lr, weight_decay=train.weight_decay, fused=on_cpu or None)


def set_rates(optimizer: torch.optim.Optimizer, train: TrainSpec, factor: float) -> None:
    """Set the learning rates of an RL training step: `factor` times the spec's rates of actor and critic."""
    rates = (train.lr, train.lr if train.value_lr is None else train.value_lr)
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate * factor


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set one learning rate for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    strategy: ParallelStrategy,
    limit: float | None,
    loss: torch.Tensor,
    model: str,
    where: str,
) -> float:
    """Add up the gradients of all ranks, clip their norm to `limit`, and make a step. Return the norm before clipping.

    Raises UserError naming `model` and `where` for a loss or gradient that is not finite; the weights are unchanged
    then.
    """
    strategy.reduce(parameters)
    max_norm = limit if limit is not None else float("inf")
    norm = strategy.full_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    if not bool(torch.isfinite(norm + loss)):
        raise UserError(
            f"the loss or gradient of model {model!r} is not finite in {where}; the weights are unchanged. Lower "
            f"train.lr or train.max_grad_norm, and look for extreme rewards or advantages"
        )
    optimizer.step()
    return float(norm)
