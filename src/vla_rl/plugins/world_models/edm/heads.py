"""The network that tells from a picture, and from the chunk that follows on it, where that leads and how it ends."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.core.randomness import Noise
from vla_rl.plugins.world_models.edm.motion import PICTURE, Path, at_most
from vla_rl.toolkit.world_models.unet import conv3x3

WORDS = 512
"""Buckets that words of instructions are hashed to."""
AROUND = 24
"""Pixels in each direction that are looked at."""
DROPPED = 0.3
"""Share of what is found around a place that is hidden in training."""


class Glance(nn.Module):
    """Looks at pictures of one camera around the places where the robot is, pixel by pixel: what it sees is where
    things are from there, which is all that most ends depend on."""

    def __init__(self, channels: int, condition: int) -> None:
        super().__init__()
        self.told = nn.Linear(condition, 2 * channels)
        self.conv_in, self.mixed = conv3x3(3, channels), nn.Conv2d(channels, channels, 1)
        self.halved = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.quartered = nn.Conv2d(2 * channels, 2 * channels, 3, stride=2, padding=1)
        self.seen = nn.Linear(2 * channels * (AROUND // 4) ** 2, 2 * channels)

    def forward(self, x: Tensor, places: Tensor, condition: Tensor, noise: Noise | None) -> Tensor:
        """What pictures [B, 3, H, W] show around places [B, C, 2], by instruction [B, condition]: [B, C, 2 channels].
        With noise, of B samples, some of it is hidden, as in training."""
        count = places.shape[1]
        pixels = torch.arange(AROUND, device=x.device) - (AROUND - 1) / 2
        around = torch.stack(torch.meshgrid(*(pixels * 2 / side for side in x.shape[:1:-1]), indexing="xy"), dim=-1)
        grid = (places[:, :, None, None] + around).flatten(1, 2)  # [B, C AROUND, AROUND, 2]
        found = F.grid_sample(x, grid, align_corners=False).unflatten(2, (count, AROUND))
        found = found.transpose(1, 2).flatten(0, 1)  # [B C, 3, AROUND, AROUND]
        found = found.contiguous(memory_format=torch.channels_last)  # convolutions of few channels are faster so
        scale, shift = self.told(condition).repeat_interleave(count, 0)[:, :, None, None].chunk(2, dim=1)
        found = F.silu(self.mixed(F.silu(self.conv_in(found) * (1 + scale) + shift)))
        found = F.silu(self.quartered(F.silu(self.halved(found)))).flatten(1)
        if noise is not None:
            kept = torch.from_numpy(noise.uniforms(found.shape[1])).to(found.device) >= DROPPED
            found = found * kept.repeat_interleave(count, 0) / (1 - DROPPED)
        return F.silu(self.seen(found)).unflatten(0, (-1, count))  # type: ignore[no-any-return]


class Heads(nn.Module):
    """State and outcome, from the picture before a chunk: they look where each action leads. What is imagined of the
    next picture has no say, so that a blurred one is not taken for a success."""

    def __init__(self, cameras: int, actions: int, state: int, channels: int, size: int) -> None:
        """
        Args:
            actions: numbers of an action.   size: of the condition.
        """
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, size, mode="sum")
        self.condition = nn.Sequential(nn.Linear(size, size), nn.SiLU())
        self.glances = nn.ModuleList([Glance(channels, size) for _ in range(cameras)])
        features = cameras * 2 * channels + 2 * (state or actions) + actions + size
        self.so_far = nn.GRU(features, size, batch_first=True)
        """Along the chunk: what an action leads to depends on those before it."""
        features += size
        self.state = nn.Sequential(nn.Linear(features, size), nn.SiLU(), _silent(size, state)) if state else None
        self.ends = nn.Sequential(
            nn.Linear(features, size), nn.SiLU(), nn.Linear(size, size), nn.SiLU(), nn.Linear(size, 2)
        )

    def forward(self, before: Tensor, path: Path, instructions: Sequence[str], noise: Noise | None = None) -> Tensor:
        """Features of each action [B, C, D], from the pictures [B, cameras 3, H, W] before them; noise: for dropout."""
        words, offsets = hashed_words(instructions, before.device)
        condition = self.condition(self.words(words, offsets))
        pictures = at_most(before, PICTURE).chunk(len(self.glances), dim=1)
        looks = zip(self.glances, pictures, path.places, strict=True)
        seen = [glance(picture, places, condition, noise) for glance, picture, places in looks]
        earlier = torch.cat((path.start[:, None], path.poses[:, :-1]), dim=1)
        given = condition[:, None].expand(-1, path.steps.shape[1], -1)
        features = torch.cat((*seen, path.poses, earlier, path.steps, given), dim=2)
        return torch.cat((self.so_far(features)[0], features), dim=2)

    def next_state(self, features: Tensor, path: Path, played: Tensor) -> Tensor:
        """After so many actions (int64 [B], at least 1): [B, S]."""
        rows, last = torch.arange(len(played), device=played.device), played - 1
        if self.state is None:
            return path.poses[:, 0, :0]
        return path.poses[rows, last] + self.state(features[rows, last])  # type: ignore[no-any-return]

    def logits(self, features: Tensor) -> Tensor:
        """Of the classes of outcomes, [B, 1 + 2 C]."""
        success, failure = self.ends(features).unbind(2)
        return torch.cat((torch.zeros_like(success[:, :1]), success, failure), dim=1)


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
