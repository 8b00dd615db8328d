"""GR00T's action head: refines the language model's tokens of images and prompt, then denoises actions with a diffusion
transformer that attends to them.

Even blocks of the transformer attend to images and prompt, odd ones to the tokens of state and actions (and, in N1.5,
to "future" tokens). Layers on state and actions have weights for each robot ("embodiment"); a policy uses one set of
them. The original N1.5's head attends to padding; here it is masked, on the right of the prompt, so that a sample's
result does not depend on its batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_rl.plugins.models.gr00t.folder import GrootSizes
from vla_rl.toolkit.models.flow.checkpoint import FlowShape

Pair = tuple[Tensor, Tensor]
"""Keys and values, [B, heads, T, D]."""
Source = tuple[Tensor, Tensor | None]
"""Tokens that a block attends to, [B, T, D], and which of them are visible: bool [B, 1, 1, T] (None: all)."""
BUCKETS = 1000
CLOCK = 256
"""Size of the timestep embedding's sinusoidal input."""


class CategoryLinear(nn.Module):
    """Linear layer with separate weights for each embodiment."""

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(count, inputs, outputs))
        self.b = nn.Parameter(torch.empty(count, outputs))

    def forward(self, x: Tensor, row: int) -> Tensor:
        return F.linear(x, self.W[row].T, self.b[row])


class CategoryMLP(nn.Module):
    """Two-layer MLP with separate weights for each embodiment."""

    def __init__(self, count: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(count, inputs, hidden)
        self.layer2 = CategoryLinear(count, hidden, outputs)

    def forward(self, x: Tensor, row: int) -> Any:
        return self.layer2(F.relu(self.layer1(x, row)), row)


class ActionEncoder(nn.Module):
    """Encodes noisy actions and the time as tokens, with separate weights for each embodiment."""

    def __init__(self, count: int, inputs: int, width: int) -> None:
        super().__init__()
        self.W1 = CategoryLinear(count, inputs, width)
        self.W2 = CategoryLinear(count, 2 * width, width)
        self.W3 = CategoryLinear(count, width, width)
        self.frequencies = nn.Buffer(make_frequencies(width // 2, width // 2), persistent=False)

    def forward(self, x: Tensor, bucket: Tensor, row: int) -> Any:
        """Return tokens [B, H, D] of noisy actions [B, H, A] at time buckets [B]."""
        embed = self.W1(x, row)
        sine, cosine = encode_times(bucket, self.frequencies)
        embedded = torch.cat([embed, torch.cat([sine, cosine], dim=1)[:, None].expand_as(embed)], dim=2)
        return self.W3(F.silu(self.W2(embedded, row)), row)


def encode_times(bucket: Tensor, frequencies: Tensor) -> Pair:
    """Return sines and cosines float32 [B, count] of time buckets [B]."""
    angle = bucket[:, None] * frequencies
    return angle.sin(), angle.cos()


def make_frequencies(count: int, divisor: int) -> Tensor:
    """Return frequencies float32 [count], of wavelengths up to 10,000."""
    return torch.exp(-torch.arange(count, dtype=torch.float32) * (math.log(10_000.0) / divisor))


def find_time_bucket(time: Tensor) -> Tensor:
    """Return the time bucket as the original counts it, from noise (0) to actions, in whole thousandths. 1e-3 is added
    before rounding down, more than float32 may be off."""
    return ((1 - time.float()) * BUCKETS + 1e-3).floor()


def apply_layer_norm(x: Tensor, norm: nn.LayerNorm | None = None, eps: float = 1e-5) -> Tensor:
    """Return the layer norm of x, computed and returned in float32."""
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)


class HeadAttention(nn.Module):
    """Multi-head attention with diffusers' parameter names."""

    def __init__(self, width: int, source: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(source, width)
        self.to_v = nn.Linear(source, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def compute_pair(self, source: Tensor) -> Pair:
        return self._split_heads(self.to_k(source)), self._split_heads(self.to_v(source))

    def forward(self, x: Tensor, pair: Pair, mask: Tensor | None) -> Any:
        attended = F.scaled_dot_product_attention(self._split_heads(self.to_q(x)), *pair, attn_mask=mask)
        return self.to_out[0](attended.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Any:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Projection(nn.Module):
    """First layer of a feed-forward block: linear, then GELU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


def feed_forward(width: int) -> nn.ModuleDict:
    wide = 4 * width
    return nn.ModuleDict({"net": nn.Sequential(Projection(width, wide), nn.Identity(), nn.Linear(wide, width))})


class HeadBlock(nn.Module):
    """Self-attention and MLP block with pre-layer norms."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width)
        self.attn1 = HeadAttention(width, width, heads)
        self.ff = feed_forward(width)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        base = apply_layer_norm(x, self.norm1).to(x.dtype)
        x = x + self.attn1(base, self.attn1.compute_pair(base), mask)
        return x + self.ff["net"](apply_layer_norm(x, self.norm3).to(x.dtype))


class Modulation(nn.Module):
    """Layer norm whose scale and shift depend on the time (AdaLN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, clock: Tensor) -> Any:
        scale, shift = self.linear(clock)[:, None].chunk(2, dim=2)
        return torch.addcmul(shift, apply_layer_norm(x), 1 + scale).to(x.dtype)


class TimedBlock(nn.Module):
    """Attention and MLP block whose first norm is modulated by the time (AdaLN); its second norm has no weights."""

    called_methods = ("pair",)
    """Methods that are called from outside of `forward`; FSDP gathers the weights around them, too."""

    def __init__(self, width: int, source: int, heads: int) -> None:
        super().__init__()
        self.norm1 = Modulation(width)
        self.attn1 = HeadAttention(width, source, heads)
        self.ff = feed_forward(width)

    def pair(self, tokens: Tensor) -> Pair:
        """Return keys and values of the tokens [B, T, D'] that the block attends to."""
        return self.attn1.compute_pair(tokens)

    def forward(self, x: Tensor, clock: Tensor, pair: Pair | None, mask: Tensor | None, last: int) -> Any:
        """Return the block's output for the last tokens.

        Args:
            pair: keys and values of images and prompt; None: the tokens attend to each other.
            last: number of tokens, from the end, that are computed.
        """
        base = self.norm1(x, clock)
        x = x[:, -last:] + self.attn1(base[:, -last:], self.attn1.compute_pair(base) if pair is None else pair, mask)
        return x + self.ff["net"](apply_layer_norm(x).to(x.dtype))


class TimestepEmbedding(nn.Module):
    """Sinusoidal embedding of the time, followed by an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(CLOCK, width)
        self.linear_2 = nn.Linear(width, width)
        # The last frequency is 1 / 10,000 here (diffusers' `downscale_freq_shift=1`), and not in ActionEncoder.
        self.frequencies = nn.Buffer(make_frequencies(CLOCK // 2, CLOCK // 2 - 1), persistent=False)

    def forward(self, bucket: Tensor) -> Any:
        sine, cosine = encode_times(bucket, self.frequencies)
        return self.linear_2(F.silu(self.linear_1(torch.cat([cosine, sine], dim=1))))


class DiffusionTransformer(nn.Module):
    """Transformer that denoises actions (DiT): cross-attention in even blocks, self-attention in odd ones."""

    def __init__(self, sizes: GrootSizes) -> None:
        super().__init__()
        width = sizes.width
        self.timestep_encoder = nn.ModuleDict({"timestep_embedder": TimestepEmbedding(width)})
        self.transformer_blocks = nn.ModuleList(
            TimedBlock(width, width if i % 2 else sizes.text_width, sizes.dit_heads) for i in range(sizes.dit_depth)
        )
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, sizes.output)

    def compute_pairs(self, sources: list[Source]) -> list[Pair]:
        """Return keys and values of what each even block attends to; they are the same at every time step."""
        blocks: Any = self.transformer_blocks
        return [block.pair(tokens) for block, (tokens, _) in zip(blocks[::2], sources, strict=True)]

    def forward(self, x: Tensor, bucket: Tensor, pairs: list[Pair], masks: list[Tensor | None], last: int) -> Any:
        """Return the output float32 [B, last, D'] of the last of the tokens [B, T, D]."""
        clock = F.silu(self.timestep_encoder["timestep_embedder"](bucket))
        blocks = self.transformer_blocks
        for i, block in enumerate(blocks):
            # Even blocks attend to the sources, odd ones to the tokens themselves.
            context = (None, None) if i % 2 else (pairs[i // 2], masks[i // 2])
            x = block(x, clock, *context, last if i == len(blocks) - 1 else x.shape[1])
        shift, scale = self.proj_out_1(clock)[:, None].chunk(2, dim=2)
        return self.proj_out_2(apply_layer_norm(x, eps=1e-6) * (1 + scale) + shift)


class ActionHead(nn.Module):
    """All parts of the action head, with the original's parameter names."""

    def __init__(self, sizes: GrootSizes, shape: FlowShape) -> None:
        super().__init__()
        count, width = sizes.embodiments, sizes.width
        self.model = DiffusionTransformer(sizes)
        self.state_encoder = CategoryMLP(count, shape.state_dim, sizes.hidden, width)
        self.action_encoder = ActionEncoder(count, shape.action_dim, width)
        self.action_decoder = CategoryMLP(count, sizes.output, sizes.hidden, shape.action_dim)
        self.future_tokens = nn.Embedding(sizes.future_tokens, width) if sizes.future_tokens else None
        self.vlln = nn.LayerNorm(sizes.text_width)
        blocks = nn.ModuleList(HeadBlock(sizes.text_width, sizes.mixer_heads) for _ in range(sizes.mixer_depth))
        self.vl_self_attention = nn.ModuleDict({"transformer_blocks": blocks})
        self.position_embedding = nn.Embedding(sizes.positions, width)

    def refine_tokens(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return the refined tokens of the language model's output [B, P, D], to which the transformer attends."""
        x = apply_layer_norm(hidden, self.vlln).to(hidden.dtype)
        blocks: Any = self.vl_self_attention["transformer_blocks"]
        for block in blocks:
            x = block(x, mask)
        return x
