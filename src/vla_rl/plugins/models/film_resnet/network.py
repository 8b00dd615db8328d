"""Network: images, state and instruction -> logits of action bins (or means and spreads), and values.

Each camera has its own residual ConvNet, whose blocks are modulated by the instruction (FiLM, Perez et al. 2018).
From its last feature map the network takes the positions of K features (spatial softmax, Levine et al. 2016) and the
mean of all channels. Channels are normalised in groups within one image, so samples of a batch are independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.plugins.models.film_resnet.config import GROUP, Bins, NetworkConfig
from vla_rl.toolkit.models import networks
from vla_rl.toolkit.models.heads import ValueHead
from vla_rl.toolkit.models.meta_device import device_autocast
from vla_rl.toolkit.models.networks import Normal

GAUSSIAN = 2
"""Outputs of the Gaussian head for each number of an action: mean and spread."""


def make_conv(channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 3, padding=1, bias=False)


def make_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // GROUP, channels)


class FilmBlock(nn.Module):
    """Residual block x + relu(film(norm(make_conv(relu(norm(make_conv(x)))))))."""

    def __init__(self, channels: int, instruction: int) -> None:
        super().__init__()
        self.conv1 = make_conv(channels)
        self.norm1 = make_norm(channels)
        self.conv2 = make_conv(channels)
        self.norm2 = make_norm(channels)
        self.film = nn.Linear(instruction, 2 * channels)

    def forward(self, x: Tensor, instruction: Tensor) -> Tensor:
        """Return [B, K, H, W] for maps [B, K, H, W] and instruction embeddings [B, E]."""
        scale, shift = self.film(instruction)[:, :, None, None].chunk(2, dim=1)
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return x + F.relu(y * (1 + scale) + shift)


class Stage(nn.Module):
    """Strided convolution to fewer pixels and more channels, then residual blocks."""

    def __init__(self, inputs: int, channels: int, kernel: int, stride: int, config: NetworkConfig) -> None:
        super().__init__()
        self.down = nn.Conv2d(inputs, channels, kernel, stride, padding=(kernel - stride + 1) // 2, bias=False)
        self.norm = make_norm(channels)
        self.blocks = nn.ModuleList(FilmBlock(channels, config.instruction) for _ in range(config.blocks))

    def forward(self, x: Tensor, instruction: Tensor) -> Tensor:
        x = F.relu(self.norm(self.down(x)))
        for block in self.blocks:
            x = block(x, instruction)
        return x


class CameraTower(nn.Module):
    """Encoder of one camera's images: features [B, 2 * keypoints + channels]."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        first = Stage(3, config.channels[0], 8, 4, config)
        further = (Stage(wide, narrow, 3, 2, config) for wide, narrow in pairwise(config.channels))
        self.stages = nn.ModuleList((first, *further))
        self.keypoints = nn.Conv2d(config.channels[-1], config.keypoints, 1)

    def forward(self, x: Tensor, instruction: Tensor) -> Tensor:
        """Return features [B, D] of images [B, 3, S, S] in [-1, 1] and instruction embeddings [B, E]."""
        for stage in self.stages:
            x = stage(x, instruction)
        return torch.cat([soft_argmax(self.keypoints(x)), x.mean((2, 3))], dim=1)


def soft_argmax(maps: Tensor) -> Tensor:
    """Return the spatial softmax [B, 2 K] of maps [B, K, H, W]: the mean x, then y, of each map, in [-1, 1]."""
    height, width = maps.shape[2:]
    share = torch.softmax(maps.flatten(2).float(), dim=2).view(maps.shape)
    x = share.sum(2) @ torch.linspace(-1, 1, width, device=maps.device)
    y = share.sum(3) @ torch.linspace(-1, 1, height, device=maps.device)
    return torch.cat([x, y], dim=1).to(maps.dtype)


def encode_waves(state: Tensor, count: int) -> Tensor:
    """Return the state [B, D] as [B, D (1 + 2 count)]: itself, its sines and cosines with periods 2, 1, 1/2, ..."""
    angle = (state.float().unsqueeze(-1) * (math.pi * 2.0 ** torch.arange(count, device=state.device))).flatten(1)
    return torch.cat([state, angle.sin().to(state.dtype), angle.cos().to(state.dtype)], dim=1)


class FilmValueHead(ValueHead):
    """Critic on features [B, D]: values float32 [B], or [B, outputs]. Its weights stay in float32."""

    def forward(self, features: Tensor) -> Tensor:
        with device_autocast(features.device.type, enabled=False):
            return self.run_layers((features.detach() if self.detach else features).float())


class FilmResnet(nn.Module):
    """Network with all parameters of a policy."""

    def __init__(self, config: NetworkConfig, cameras: int, state_dim: int, chunk: int, action_dim: int) -> None:
        super().__init__()
        self.shape = (chunk, action_dim, config.head.count if isinstance(config.head, Bins) else GAUSSIAN)
        self.words = nn.Embedding(config.words, config.instruction)
        self.cameras = nn.ModuleList(CameraTower(config) for _ in range(cameras))
        self.state_waves = config.state_waves
        self.features = (
            cameras * (2 * config.keypoints + config.channels[-1])
            + state_dim * (1 + 2 * config.state_waves)
            + config.instruction
        )
        self.trunk = nn.ModuleList(
            nn.Linear(wide, narrow) for wide, narrow in pairwise((self.features, *config.hidden))
        )
        self.head = nn.Linear(config.hidden[-1], math.prod(self.shape))
        self.value_head: FilmValueHead | None = None

    def encode_inputs(self, pixels: Sequence[Tensor], state: Tensor | None, bags: Tensor) -> Tensor:
        """Return features [B, D] of cameras, state and instruction; arguments as in `forward`."""
        instruction = bags @ self.words.weight
        image_features = [camera(image, instruction) for camera, image in zip(self.cameras, pixels, strict=True)]
        state_features = [] if state is None else [encode_waves(state, self.state_waves)]
        return torch.cat([*image_features, *state_features, instruction], dim=1)

    def forward(
        self, pixels: Sequence[Tensor], state: Tensor | None, bags: Tensor, act: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return float32 outputs [B, C, A, bins | 2] (None unless `act`) and values [B] | [B, C] (None without a
        critic).

        Args:
            pixels: [B, 3, S, S] of each camera.   state: normalised [B, D] or None.
            bags: [B, words], see `BagOfWords`.
            act: compute outputs.
        """
        x = self.encode_inputs(pixels, state, bags)
        values = None if self.value_head is None else self.value_head(x)
        if not act:
            return None, values
        return self.decode_features(x), values

    def decode_features(self, features: Tensor) -> Tensor:
        """Return the outputs float32 [B, C, A, bins | 2] for features [B, D] of `encode_inputs`: logits of bins, or
        means and spreads."""
        x = features
        for layer in self.trunk:
            x = F.relu(layer(x))
        outputs: Tensor = self.head(x).float().unflatten(1, self.shape)
        return outputs


def initialise_weights(network: FilmResnet, seed: int) -> None:
    """Initialise random weights with `networks.initialise_network`; all bins start nearly equally likely."""

    def initialise_other(name: str, module: nn.Module, normal: Normal) -> None:
        if isinstance(module, nn.Embedding):
            normal(module.weight, 1.0)
        elif isinstance(module, nn.GroupNorm):
            module.weight.fill_(1.0)

    networks.initialise_network(network, seed, "head", initialise_other)
