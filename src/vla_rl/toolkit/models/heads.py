"""Critics and Flow-Noise's network on public networks: float32 weights, in separate files next to the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.toolkit.models.checkpoints.files import read_file, save_tensors
from vla_rl.toolkit.models.networks import load_weights

VALUE_HEAD, NOISE_HEAD = "value_head.safetensors", "noise_head.safetensors"
STEERING_HEAD = "steering_head.safetensors"


@torch.no_grad()
def initialise_layer(layer: nn.Module, gain: float, rng: torch.Generator) -> None:
    """Set normal weights of this gain, and no bias."""
    assert isinstance(layer, nn.Linear)
    layer.weight.copy_(torch.randn(layer.weight.shape, generator=rng) * (gain / math.sqrt(layer.in_features)))
    if layer.bias is not None:
        layer.bias.zero_()


def small_mlp(widths: list[int], seed: int, gain: float = math.sqrt(2.0), last_bias: bool = True) -> nn.ModuleList:
    """Return linear layers whose weights depend on the seed alone; the last one starts small."""
    layers = nn.ModuleList(nn.Linear(wide, narrow) for wide, narrow in pairwise(widths[:-1]))
    layers.append(nn.Linear(widths[-2], widths[-1], bias=last_bias))
    rng = torch.Generator().manual_seed(seed)
    for layer in layers:
        initialise_layer(layer, 0.01 if layer is layers[-1] else gain, rng)
    return layers


def load_head(head: nn.Module | None, folder: Path | None, name: str) -> None:
    """Load the head's weights that were saved with the checkpoint, if any. Raise CheckpointError if they misfit."""
    if head is not None and folder is not None and (folder / name).is_file():
        path = folder / name
        load_weights(head, read_file(path, load_file), path, "; remove the file to start with a new one")


def save_head(head: nn.Module | None, folder: Path, name: str, dtype: torch.dtype | None = None) -> None:
    """Write the file that `load_head` reads, in this precision (None: as it is)."""
    if head is not None:
        save_tensors(on_host(head.state_dict(), dtype), folder / name)


def on_host(state: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", dtype or t.dtype).contiguous() for name, t in state.items()}


class ValueHead(nn.Module):
    """Critic: an MLP from features [..., D] to float32 values [...], or [..., outputs] where `outputs` is a number. Its
    weights depend on the seed alone; `detach` keeps its gradient out of the features."""

    def __init__(
        self, dim: int, hidden: tuple[int, ...], outputs: int | None, detach: bool, seed: int, last_bias: bool = True
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.detach = detach
        self.layers = small_mlp([dim, *hidden, outputs or 1], seed, last_bias=last_bias)

    def run_layers(self, x: Tensor, activation: Callable[[Tensor], Tensor] = F.relu) -> Tensor:
        for layer in self.layers[:-1]:
            x = activation(layer(x))
        values: Tensor = self.layers[-1](x)
        return values.squeeze(-1) if self.outputs is None else values


class HorizonValueHead(ValueHead):
    """Critic on an action expert's output: from [B, H, D] to float32 [B], by the mean over the horizon; with
    `per_action`, to [B, C], one value from the token of each executed action."""

    passes = 1
    """Denoising steps, from the mean noise on, whose values are averaged."""

    def __init__(self, dim: int, hidden: tuple[int, ...], per_action: int | None, detach: bool, seed: int) -> None:
        super().__init__(dim, hidden, None, detach, seed)
        self.per_action = per_action

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.float()
        return self.run_layers(x.mean(1) if self.per_action is None else x[:, : self.per_action])


class PrefixValueHead(ValueHead):
    """Critic on a vision-language model's mean output: from [B, D] to float32 [B], or [B, C] with a value an action."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run_layers(x)


class NoiseHead(nn.Module):
    """Standard deviation of each element of the next denoising state, from the expert's output: [B, H, D] -> [B, H, A].
    An MLP of 128 and 64 (tanh) whose squashed output moves the log-variance between the bounds (RLinf)."""

    def __init__(self, dim: int, outputs: int, bounds: tuple[float, float], seed: int) -> None:
        super().__init__()
        self.low = math.log(bounds[0])
        self.high = math.log(bounds[1])
        self.layers = small_mlp([dim, 128, 64, outputs], seed, gain=1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.float()
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return torch.exp(self.low + (self.high - self.low) * (torch.tanh(self.layers[-1](x)) + 1) / 2)
