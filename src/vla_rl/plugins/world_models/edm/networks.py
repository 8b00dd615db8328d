"""The denoiser of DIAMOND, given chunks of continuous actions; and the network that tells state and outcome."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.toolkit.world_models.diffusion import Conditioners
from vla_rl.toolkit.world_models.unet import AdaptiveNorm, FourierEmbedding, UNet, conv3x3, group_norm

WORDS = 512
"""Buckets that words of instructions are hashed to."""
GAIN = 10.0
"""Lets the part of the next state that is linear in the actions be found in few steps."""


class Denoiser(nn.Module):
    """F of `toolkit/world_models/diffusion.py`: says of noisy frames what their clean ones are, given the past.

    Differs from DIAMOND in what an action is: a chunk with a flag that it was played, through a linear layer instead of
    an embedding. The last state is part of the condition too.
    """

    def __init__(
        self,
        frame: int,
        history: int,
        chunk: int,
        state: int,
        channels: Sequence[int],
        depths: Sequence[int],
        size: int,
    ) -> None:
        """
        Args:
            frame: channels of a frame.   chunk: numbers of a chunk, its flag included.   state: numbers of a state.
            size: of the condition.
        """
        super().__init__()
        self.noise = FourierEmbedding(size)
        self.actions = nn.Linear(chunk, size // history)
        self.state = nn.Linear(state, size) if state else None
        self.condition = nn.Sequential(nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size))
        self.conv_in = conv3x3((history + 1) * frame, channels[0])
        self.unet = UNet(channels, depths, size)
        self.norm_out = group_norm(channels[0])
        self.conv_out = conv3x3(channels[0], frame)
        nn.init.zeros_(self.conv_out.weight)

    def forward(self, noisy: Tensor, c: Conditioners, past: Tensor, chunks: Tensor, state: Tensor) -> Tensor:
        """
        Args:
            noisy: [B, frame, H, W].   past: [B, K, frame, H, W], the oldest first.
            chunks: [B, K, chunk], the last of which leads to the frame.   state: [B, S] before it.
        """
        embedded = self.noise(c.c_noise.expand(len(noisy))) + self.actions(chunks).flatten(1)
        if self.state is not None:
            embedded = embedded + self.state(state)
        condition = self.condition(embedded)
        x = self.conv_in(torch.cat((past.flatten(1, 2) / 0.5, c.c_in * noisy), dim=1))
        return self.conv_out(F.silu(self.norm_out(self.unet(x, condition))))  # type: ignore[no-any-return]


class Heads(nn.Module):
    """What the frames before and after a chunk tell: the state after it, and how the episode went on."""

    def __init__(
        self, frame: int, chunks: int, history: int, state: int, classes: int, channels: int, size: int, grid: int
    ) -> None:
        """
        Args:
            frame: channels of a frame.   chunks: numbers of the `history` chunks of a window.
            grid: larger side of a frame.
        """
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, size, mode="sum")
        told = chunks + state
        self.given = nn.Linear(told, size)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(size, size), nn.SiLU())
        self.conv_in = conv3x3(2 * frame, channels)
        halvings = max(0, (grid - 1).bit_length() - 2)
        self.halve = nn.ModuleList([nn.Conv2d(channels, channels, 3, stride=2, padding=1) for _ in range(halvings)])
        self.norms = nn.ModuleList([AdaptiveNorm(channels, size) for _ in range(halvings + 1)])
        self.seen = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 4 * size), nn.SiLU())
        self.state = self.moved = None
        if state:
            self.state = nn.Sequential(nn.Linear(5 * size + told, size), nn.SiLU(), _silent(size, state))
            self.moved = _silent(chunks // history, state)
        self.outcome = nn.Sequential(
            nn.Linear(5 * size + told + state, 2 * size), nn.SiLU(), nn.Linear(2 * size, classes)
        )

    def look(self, before: Tensor, after: Tensor, chunks: Tensor, state: Tensor, instructions: Sequence[str]) -> Tensor:
        """Features of frames [B, frame, H, W] before and after a chunk; chunks [B, K, chunk]; state [B, S] before."""
        words, offsets = hashed_words(instructions, before.device)
        told = torch.cat((chunks.flatten(1), state), dim=1)
        condition = self.words(words, offsets) + self.given(told)
        condition = self.condition(condition)
        x = self.norms[0](self.conv_in(torch.cat((before, after), dim=1)), condition)
        for halve, norm in zip(self.halve, self.norms[1:], strict=True):
            x = norm(halve(F.silu(x)), condition)
        return torch.cat((self.seen(F.silu(x)), condition, told), dim=1)

    def next_state(self, features: Tensor, chunk: Tensor, state: Tensor) -> Tensor:
        """After a chunk [B, chunk]: a linear function of its actions, and what the pictures add to that."""
        if self.state is None or self.moved is None:
            return state
        return state + GAIN * self.moved(chunk) + self.state(features)  # type: ignore[no-any-return]

    def logits(self, features: Tensor, after: Tensor) -> Tensor:
        """Of the classes of outcomes; `after`: the state after the chunk."""
        return self.outcome(torch.cat((features, after), dim=1))  # type: ignore[no-any-return]


def _silent(inputs: int, outputs: int) -> nn.Linear:
    """Gives its bias before training."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    return layer


def hashed_words(instructions: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Buckets of all words, and where each instruction begins."""
    buckets = [[zlib.crc32(word.encode()) % WORDS for word in text.lower().split()] for text in instructions]
    offsets = torch.tensor([0, *(len(b) for b in buckets[:-1])]).cumsum(0)
    return torch.tensor([i for b in buckets for i in b], dtype=torch.int64, device=device), offsets.to(device)
