"""The steering head of a flow policy, which chooses the initial noise that the frozen policy denoises.

Wagenmaker et al. 2025, "Steering Your Diffusion Policy with Latent Space Reinforcement Learning" (arXiv 2506.15799).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.toolkit.models.flow.config import SteeringConfig
from vla_rl.toolkit.models.heads import small_mlp
from vla_rl.toolkit.models.squashed_gaussian import SquashedGaussian


class SteeringHead(nn.Module):
    """MLP from the policy's features [B, D] to squashed Gaussians [B, R, W] of the initial noise. Its weights are
    float32 and depend on the seed alone; the first means are about 0, the noise of a greedy policy."""

    range: Tensor

    def __init__(self, inputs: int, shape: tuple[int, int], config: SteeringConfig, seed: int) -> None:
        """Create the head.

        Args:
            inputs: D, numbers of the features.
            shape: actions of a denoised chunk, and numbers of an action.
        """
        super().__init__()
        horizon, width = shape
        self.shape = (horizon if config.per_action else 1, width)
        """R, W: noise vectors, and numbers of one."""
        self.horizon = horizon
        self.norm = nn.LayerNorm(inputs)
        self.layers = small_mlp([inputs, *config.hidden, 2 * self.shape[0] * width], seed)
        self.register_buffer("range", torch.tensor(config.range, dtype=torch.float64))

    def forward(self, features: Tensor, temperature: float = 1.0) -> SquashedGaussian:
        x = self.norm(features.float())
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return SquashedGaussian.of_outputs(self.layers[-1](x).unflatten(1, (*self.shape, 2)), temperature)

    def initial_noise(self, unsquashed: Tensor) -> Tensor:
        """Return the initial noise [B, H, W] of unsquashed samples [B, R, W]; one vector is repeated over the chunk."""
        return (self.range * torch.tanh(unsquashed)).expand(-1, self.horizon, -1)


def saved_settings(saved: dict[str, Tensor], width: int) -> SteeringConfig:
    """Return the settings of a head with these weights. Raises KeyError or ValueError where they are none."""
    layers = sum(name.startswith("layers.") and name.endswith(".weight") for name in saved)
    outputs = [len(saved[f"layers.{i}.weight"]) for i in range(layers)]
    return SteeringConfig(
        range=float(saved["range"]),
        hidden=tuple(outputs[:-1]),
        per_action=outputs[-1] > 2 * width if outputs else False,
    )
