"""float32 masters of trained weights that are narrower (Micikevicius et al. 2018, section 3.1).

A bfloat16 number has 8 significant bits, so an optimiser step of less than 1/512 of a weight rounds back to that
weight, and a moment that decays by 0.999 stays where it is. The optimiser therefore steps on float32 copies with
float32 moments, and the network computes with their rounded values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether weights of this type need masters: floating-point types with fewer bits than float32."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


class MasterWeights:
    """float32 masters of the narrow ones among some parameters of a network. Gradients of such a parameter go to its
    master, in which micro-batches are summed in float32; the parameter keeps none. A step of an optimiser on the
    masters is followed by `round_weights`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy the narrow ones among these parameters (name -> parameter of the network)."""
        self._weights = {name: p for name, p in parameters.items() if is_narrow(p.dtype)}
        self.masters = {name: nn.Parameter(p.detach().float()) for name, p in self._weights.items()}
        """Masters by name."""
        for name, parameter in self._weights.items():
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, self.masters[name]))

    def follow_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Round the weights after every step of an optimiser, which has the masters among its parameters."""
        if self.masters:
            optimizer.register_step_post_hook(lambda *_: self.round_weights())

    @torch.no_grad()
    def round_weights(self) -> None:
        """Set each weight of the network to its master's value, rounded once."""
        if self.masters:
            torch._foreach_copy_(list(self._weights.values()), list(self.masters.values()))


def _move_gradient(master: nn.Parameter, weight: torch.Tensor) -> None:
    """Add the gradient of a weight to that of its master, and free it."""
    gradient = weight.grad
    assert gradient is not None
    weight.grad = None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)
