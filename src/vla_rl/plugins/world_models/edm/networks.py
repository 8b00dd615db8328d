"""DIAMOND's denoiser, conditioned on chunks of continuous actions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.toolkit.world_models.diffusion import Conditioners
from vla_rl.toolkit.world_models.unet import FourierEmbedding, UNet, conv3x3, group_norm


class Denoiser(nn.Module):
    """Network F of `toolkit/world_models/diffusion.py`: predicts clean frames from noisy ones, given the past.

    Differs from DIAMOND in what an action is: a chunk with a flag that it was executed, through a linear layer
    instead of an embedding. The last state is part of the condition too.
    """

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
