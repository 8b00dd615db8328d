"""DIAMOND's denoiser, conditioned on chunks of continuous actions; and the network that predicts the next state and the
outcome of a chunk, from the image before it and its actions."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.core.randomness import Noise
from vla_rl.plugins.world_models.edm.motion import IMAGE_SIDE, Path, at_most
from vla_rl.toolkit.world_models.diffusion import Conditioners
from vla_rl.toolkit.world_models.unet import FourierEmbedding, UNet, conv3x3, group_norm

WORDS = 512
"""Hash buckets of the words of instructions."""
AROUND = 24
"""Side, in pixels, of the square crop around the robot that is looked at."""
DROPPED = 0.3
"""Dropout rate of the features of a crop."""


class CropEncoder(nn.Module):
    """Convolutional encoder of crops of one camera's images, centred on the robot. Positions of objects relative to
    the robot are what most outcomes depend on."""

    def __init__(self, channels: int, condition: int) -> None:
        super().__init__()
        self.told = nn.Linear(condition, 2 * channels)
        self.conv_in = conv3x3(3, channels)
        self.mixed = nn.Conv2d(channels, channels, 1)
        self.halved = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.quartered = nn.Conv2d(2 * channels, 2 * channels, 3, stride=2, padding=1)
        self.seen = nn.Linear(2 * channels * (AROUND // 4) ** 2, 2 * channels)

    def forward(self, x: Tensor, places: Tensor, condition: Tensor, noise: Noise | None) -> Tensor:
        """Return features [B, C, 2 * channels] of images [B, 3, H, W] around `places` [B, C, 2]: (x, y)
        after each of C actions, in [-1, 1] across the image; conditioned on the instruction [B, condition]. With
        `noise` (of B samples) dropout is applied, as in training, with one mask for the C crops of a sample."""
        count = places.shape[1]
        pixels = torch.arange(AROUND, device=x.device) - (AROUND - 1) / 2
        around = torch.stack(torch.meshgrid(*(pixels * 2 / side for side in x.shape[:1:-1]), indexing="xy"), dim=-1)
        grid = (places[:, :, None, None] + around).flatten(1, 2)  # [B, C AROUND, AROUND, 2]
        patches = F.grid_sample(x, grid, align_corners=False).unflatten(2, (count, AROUND))
        patches = patches.transpose(1, 2).flatten(0, 1)  # [B C, 3, AROUND, AROUND]
        patches = patches.contiguous(memory_format=torch.channels_last)  # faster for convolutions of few channels
        scale, shift = self.told(condition).repeat_interleave(count, 0)[:, :, None, None].chunk(2, dim=1)
        patches = F.silu(self.mixed(F.silu(self.conv_in(patches) * (1 + scale) + shift)))
        patches = F.silu(self.quartered(F.silu(self.halved(patches)))).flatten(1)
        if noise is not None:
            dropout_mask = torch.from_numpy(noise.uniforms(patches.shape[1])).to(patches.device) >= DROPPED
            patches = patches * dropout_mask.repeat_interleave(count, 0) / (1 - DROPPED)
        return F.silu(self.seen(patches)).unflatten(0, (-1, count))  # type: ignore[no-any-return]


class Heads(nn.Module):
    """Predicts state and outcome from the image before a chunk, around the positions where each action leads. The
    predicted next image is not used, so that a blurred one is not mistaken for a success."""

    def __init__(self, cameras: int, actions: int, state: int, channels: int, size: int) -> None:
        """Create the heads.

        Args:
            actions: numbers per action.   size: size of the condition.
        """
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, size, mode="sum")
        self.condition = nn.Sequential(nn.Linear(size, size), nn.SiLU())
        self.glances = nn.ModuleList([CropEncoder(channels, size) for _ in range(cameras)])
        features = cameras * 2 * channels + 2 * (state or actions) + actions + size
        self.so_far = nn.GRU(features, size, batch_first=True)
        """GRU along the chunk: the effect of an action depends on those before it."""
        features += size
        self.state = (
            nn.Sequential(nn.Linear(features, size), nn.SiLU(), _make_silent_linear(size, state)) if state else None
        )
        self.ends = nn.Sequential(
            nn.Linear(features, size), nn.SiLU(), nn.Linear(size, size), nn.SiLU(), nn.Linear(size, 2)
        )

    def forward(self, before: Tensor, path: Path, instructions: Sequence[str], noise: Noise | None = None) -> Tensor:
        """Return features [B, C, D] of actions, from images [B, cameras 3, H, W] before it; `noise` of dropout."""
        words, offsets = hashed_words(instructions, before.device)
        condition = self.condition(self.words(words, offsets))
        images = at_most(before, IMAGE_SIDE).chunk(len(self.glances), dim=1)
        looks = zip(self.glances, images, path.places, strict=True)
        image_features = [glance(image, places, condition, noise) for glance, image, places in looks]
        earlier = torch.cat((path.start[:, None], path.poses[:, :-1]), dim=1)
        repeated_condition = condition[:, None].expand(-1, path.steps.shape[1], -1)
        features = torch.cat((*image_features, path.poses, earlier, path.steps, repeated_condition), dim=2)
        return torch.cat((self.so_far(features)[0], features), dim=2)

    def next_state(self, features: Tensor, path: Path, num_executed: Tensor) -> Tensor:
        """Return the state [B, S] after the first `num_executed` actions (int64 [B], at least 1) of the chunk."""
        rows, last = torch.arange(len(num_executed), device=num_executed.device), num_executed - 1
        if self.state is None:
            return path.poses[:, 0, :0]
        return path.poses[rows, last] + self.state(features[rows, last])  # type: ignore[no-any-return]

    def outcome_logits(self, features: Tensor) -> Tensor:
        """Return the logits [B, 1 + 2 C] of the outcome classes: episode continues, success at action 1..C, failure at
        action 1..C."""
        success, failure = self.ends(features).unbind(2)
        return torch.cat((torch.zeros_like(success[:, :1]), success, failure), dim=1)


def _make_silent_linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer that outputs its bias before training (weights of zero)."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    return layer


def hashed_words(instructions: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the hash buckets of all words, and the offset at which each instruction begins (for nn.EmbeddingBag)."""
    buckets = [[zlib.crc32(word.encode()) % WORDS for word in text.lower().split()] for text in instructions]
    offsets = torch.tensor([0, *(len(b) for b in buckets[:-1])]).cumsum(0)
    return torch.tensor([i for b in buckets for i in b], dtype=torch.int64, device=device), offsets.to(device)


class Denoiser(nn.Module):
    """Network F of `toolkit/world_models/diffusion.py`: predicts clean frames from noisy ones, given the past. Differs
    from DIAMOND in what an action is: a chunk with a flag that it was executed, through a linear layer instead of an
    embedding. The last state is part of the condition too."""

    def __init__(
        self,
        frame: int,
        given: int,
        history: int,
        chunk: int,
        state: int,
        channels: Sequence[int],
        depths: Sequence[int],
        size: int,
        more: int = 0,
    ) -> None:
        """Create a denoiser.

        Args:
            frame: channels of a frame.   given: channels of the conditioning images.   history: chunks given.
            chunk: numbers per chunk, its flag included.   state: numbers per state.   size: size of the condition.
            more: channels of the output beyond the frame.
        """
        super().__init__()
        self.noise = FourierEmbedding(size)
        self.actions = nn.Linear(chunk, size // history)
        self.state = nn.Linear(state, size) if state else None
        self.condition = nn.Sequential(nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size))
        self.conv_in = conv3x3(frame + given, channels[0])
        self.unet = UNet(channels, depths, size)
        self.norm_out = group_norm(channels[0])
        self.conv_out = conv3x3(channels[0], frame + more)
        nn.init.zeros_(self.conv_out.weight)

    def forward(self, noisy: Tensor, c: Conditioners, given: Tensor, chunks: Tensor, state: Tensor) -> Tensor:
        """Return the output [B, frame + more, H, W].

        Args:
            noisy: [B, frame, H, W].   given: conditioning images [B, given, H, W].
            chunks: [B, K, chunk], the last of which leads to the frame.   state: [B, S] before it.
        """
        embedded = self.noise(c.c_noise.expand(len(noisy))) + self.actions(chunks).flatten(1)
        if self.state is not None:
            embedded = embedded + self.state(state)
        condition = self.condition(embedded)
        x = self.conv_in(torch.cat((given / 0.5, c.c_in * noisy), dim=1))
        return self.conv_out(F.silu(self.norm_out(self.unet(x, condition))))  # type: ignore[no-any-return]
