"""DIAMOND's UNet (Alonso et al. 2024, arXiv 2405.12399): group norms with conditions, attention at the bottom."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 32
"""Channels per group; fewer channels are one group."""
HEAD = 8
"""Channels per attention head."""


def conv3x3(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def count_parts(channels: int, size: int) -> int:
    """Return the number of equal parts of about this size."""
    return next(count for count in range(max(1, channels // size), 0, -1) if channels % count == 0)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(count_parts(channels, GROUP), channels)


class UNetAdaptiveNorm(nn.Module):
    """Group norm with scale and shift computed from the condition [B, D]."""

    def __init__(self, channels: int, condition: int) -> None:
        super().__init__()
        self.groups = count_parts(channels, GROUP)
        self.linear = nn.Linear(condition, 2 * channels)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.linear(condition)[:, :, None, None].chunk(2, dim=1)
        return F.group_norm(x, self.groups) * (1 + scale) + shift  # type: ignore[no-any-return]


class UNetAttention(nn.Module):
    """Self-attention over all pixels; adds nothing before training."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = count_parts(channels, HEAD)
        self.norm = group_norm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        mixed = self.qkv(self.norm(x)).reshape(n, 3 * self.heads, channels // self.heads, height * width)
        query, key, value = mixed.transpose(2, 3).chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(attended.transpose(2, 3).reshape(n, channels, height, width))  # type: ignore[no-any-return]


class UNetBlock(nn.Module):
    """Two convolutions with a residual connection; the second one gives 0 before training."""

    def __init__(self, inputs: int, outputs: int, condition: int, attention: bool) -> None:
        super().__init__()
        self.short_cut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.norm1 = UNetAdaptiveNorm(inputs, condition)
        self.conv1 = conv3x3(inputs, outputs)
        self.norm2 = UNetAdaptiveNorm(outputs, condition)
        self.conv2 = conv3x3(outputs, outputs)
        self.attention = UNetAttention(outputs) if attention else nn.Identity()
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x, condition)))
        y = self.conv2(F.silu(self.norm2(y, condition)))
        return self.attention(y + self.short_cut(x))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """UNet from [B, channels[0], H, W] and a condition [B, D] to [B, channels[0], H, W], for any H and W. Level i has
    `depths[i]` blocks of `channels[i]` on the way down and one more on the way up. Between levels a strided convolution
    halves the image; on the way up it is doubled and convolved. The two lowest blocks have attention."""

    def __init__(self, channels: Sequence[int], depths: Sequence[int], condition: int) -> None:
        super().__init__()
        above = [channels[0], *channels[:-1]]
        levels = list(zip(above, channels, depths, strict=True))

        def build_blocks(inputs: Sequence[int], outputs: Sequence[int], attention: bool = False) -> nn.ModuleList:
            pairs = zip(inputs, outputs, strict=True)
            return nn.ModuleList([UNetBlock(a, b, condition, attention) for a, b in pairs])

        self.down = nn.ModuleList([build_blocks([a] + [b] * (n - 1), [b] * n) for a, b, n in levels])
        self.middle = build_blocks([channels[-1]] * 2, [channels[-1]] * 2, attention=True)
        self.up = nn.ModuleList([build_blocks([2 * b] * n + [a + b], [b] * n + [a]) for a, b, n in reversed(levels)])
        self.shrink = nn.ModuleList([nn.Conv2d(c, c, 3, stride=2, padding=1) for c in channels[:-1]])
        self.grow = nn.ModuleList([conv3x3(c, c) for c in reversed(channels[:-1])])
        for conv in self.shrink:
            nn.init.orthogonal_(conv.weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        multiple = 2 ** len(self.shrink)
        x = F.pad(x, (0, -width % multiple, 0, -height % multiple))
        skips: list[Tensor] = []
        for i, level in enumerate(self.down):
            x = self.shrink[i - 1](x) if i else x
            skips.append(x)
            for block in level:  # type: ignore[attr-defined]
                x = block(x, condition)
                skips.append(x)
        for block in self.middle:
            x = block(x, condition)
        for i, level in enumerate(self.up):
            x = self.grow[i - 1](F.interpolate(x, scale_factor=2.0, mode="nearest")) if i else x
            for block in level:  # type: ignore[attr-defined]
                x = block(torch.cat((x, skips.pop()), dim=1), condition)
        return x[..., :height, :width]


class FourierEmbedding(nn.Module):
    """Numbers [B] as cosines and sines of fixed random frequencies, [B, D]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", torch.randn(1, size // 2))

    def forward(self, values: Tensor) -> Tensor:
        angles = 2 * math.pi * values[:, None] @ self.weight
        return torch.cat([angles.cos(), angles.sin()], dim=-1)
