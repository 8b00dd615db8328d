"""AdamW over the trainable parameters of actor and critic, with separate learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vla_rl.core.errors import UserError
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.toolkit.trainers.parallel import ParallelStrategy


def build_optimizer(
    actor: Sequence[nn.Parameter], critic: Sequence[nn.Parameter], train: TrainSpec
) -> torch.optim.AdamW:
    """Return the optimiser: PyTorch's fused one, which reads nothing on the host; for shards on a CPU its default."""
    groups = [{"params": actor}, *([{"params": critic}] if critic else [])]  # every update sets the learning rates
    parameters = [*actor, *critic]
    on_cuda = all(p.device.type == "cuda" for p in parameters)
    on_cpu = all(type(p) is nn.Parameter and p.device.type == "cpu" for p in parameters)  # False for shards
    return torch.optim.AdamW(
        groups,
        lr=train.lr,
        betas=train.adam_betas,
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
        fused=on_cuda or on_cpu or None,
    )


def set_rates(optimizer: torch.optim.Optimizer, train: TrainSpec, factor: float) -> None:
    """Set the learning rates of an RL training step: `factor` times the spec's rates of actor and critic."""
    rates = (train.lr, train.lr if train.value_lr is None else train.value_lr)
    # A model without a critic has one group.
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate * factor


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set one learning rate for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class FiniteGuard:
    """Guard that keeps the weights as they are from the first loss or gradient on that is not finite. A fused optimiser
    skips its steps on the device, so that the host waits for nothing; `check_finite` then reads the result once. Other
    optimisers are checked before each step."""

    def __init__(self, model: str) -> None:
        """Create the guard. `model` is the model's name, for messages."""
        self._model = model
        self._where = ""
        self._not_finite: torch.Tensor | None = None
        """float32 scalar: 1 once something was not finite, else 0; None: nothing was tested since the last check."""

    def guard_step(self, optimizer: torch.optim.Optimizer, tested: torch.Tensor, where: str) -> None:
        """Make a step unless the scalar `tested`, or an earlier one, is not finite. Raises UserError if not fused."""
        not_finite = (~torch.isfinite(tested)).float()
        self._not_finite = not_finite if self._not_finite is None else torch.maximum(self._not_finite, not_finite)
        self._where = self._where or where
        if all(group["fused"] for group in optimizer.param_groups):
            parts: Any = optimizer
            parts.found_inf = self._not_finite  # torch reads it by this name: a gradient scaler sets it
        else:
            self.check_finite()
        optimizer.step()

    def check_finite(self) -> None:
        """Raises UserError if something was not finite since the last call; the weights are unchanged since then."""
        not_finite = self._not_finite
        where = self._where
        self._not_finite = None
        self._where = ""
        if not_finite is not None and bool(not_finite):
            raise UserError(
                f"the loss or gradient of model {self._model!r} is not finite in {where}; the weights are unchanged. "
                f"Lower train.lr or train.max_grad_norm, and look for extreme rewards or advantages"
            )


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    strategy: ParallelStrategy,
    limit: float | None,
    loss: torch.Tensor,
    guard: FiniteGuard,
    where: str,
) -> torch.Tensor:
    """Sum all ranks' gradients, clip their norm to `limit`, step unless the guard skips it. Return the norm before."""
    strategy.reduce(parameters)
    # Without a limit the norm is measured all the same.
    max_norm = limit if limit is not None else float("inf")
    norm: torch.Tensor = strategy.unshard_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    # One number for both: the sum is not finite if either is not.
    guard.guard_step(optimizer, norm + loss, where)
    return norm
