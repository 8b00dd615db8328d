"""The value function of `recap`: a separate network, so that any policy can be trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.core.types import Observation
from vla_rl.toolkit.models.bag_of_words import BagOfWords
from vla_rl.toolkit.models.networks import Normal, as_tensor, construct_module, initialise_network
from vla_rl.toolkit.reward_models.success_classifier import CHANNELS, GRID, image_encoder

PIXELS = 64
"""Side of the network's images."""
WORDS = 1024
WIDTH = 256


class ValueNetwork(nn.Module):
    """Convolutions over each camera's image, joined with the state, and scaled by features of the instruction: logits
    of a categorical distribution of returns, float32 [B, atoms]."""

    def __init__(self, cameras: Sequence[str], state_dim: int, atoms: int) -> None:
        super().__init__()
        self.cameras = tuple(cameras)
        self.state_dim = state_dim
        self.encoders = nn.ModuleList(image_encoder() for _ in self.cameras)
        self.joined = nn.Linear(len(self.cameras) * CHANNELS[-1] * GRID**2 + state_dim, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.words = nn.Embedding(WORDS, 2 * WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, atoms)
        self._bags: BagOfWords | None = None

    def forward(self, obs: Observation) -> Tensor:
        device = self.head.weight.device
        if self._bags is None:
            self._bags = BagOfWords(WORDS, device)
        parts = [
            encoder(_scale_images(as_tensor(obs.images[camera], device)))
            for camera, encoder in zip(self.cameras, self.encoders, strict=True)
        ]
        if self.state_dim:
            parts.append(as_tensor(obs.state, device).float())
        scale, shift = (self._bags(obs.instructions) @ self.words.weight).chunk(2, 1)
        x = F.silu(self.norm(self.joined(torch.cat(parts, 1))) * (1 + scale) + shift)
        logits: Tensor = self.head(F.silu(self.hidden(x)))
        return logits


def build_value_network(
    cameras: Sequence[str], state_dim: int, atoms: int, seed: int, device: torch.device
) -> ValueNetwork:
    """Return the network with random weights that depend on the seed alone."""
    network = construct_module(lambda: ValueNetwork(cameras, state_dim, atoms), torch.device("cpu"))
    with torch.no_grad():
        initialise_network(network, seed, "head", _initialise_other)
    return network.to(device)


def _initialise_other(name: str, module: nn.Module, normal: Normal) -> None:
    if isinstance(module, nn.Embedding):
        normal(module.weight, 0.5)
    elif isinstance(module, nn.GroupNorm | nn.LayerNorm):
        module.weight.fill_(1.0)


def _scale_images(images: Tensor) -> Tensor:
    """Return images uint8 [B, H, W, 3] as float32 [B, 3, PIXELS, PIXELS] in [-1, 1]."""
    x = images.permute(0, 3, 1, 2).float()
    if x.shape[2:] != (PIXELS, PIXELS):
        x = F.interpolate(x, (PIXELS, PIXELS), mode="area")
    return x / 127.5 - 1


def categorical_targets(returns: Tensor, atoms: Tensor) -> Tensor:
    """Return the atom nearest to each return, int64 [B], for evenly spaced atoms float32 [N]."""
    spacing = atoms[1] - atoms[0]
    return ((returns - atoms[0]) / spacing).round().long().clamp(0, len(atoms) - 1)


def expected_values(logits: Tensor, atoms: Tensor) -> Tensor:
    """Return the means float32 [B] of distributions over atoms float32 [N], of logits [B, N]."""
    return torch.softmax(logits, dim=1) @ atoms
