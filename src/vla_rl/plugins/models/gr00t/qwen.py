"""N1.7's towers: Qwen3-VL's weights, on square images of one size. Transformers processes images of any shape one by
one and reads their sizes on the host. Here all have the same shape, so they run as one batch, on any device. The
language model's output is taken before its final norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextModel,
    Qwen3VLVisionBlock,
    Qwen3VLVisionModel,
    apply_rotary_pos_emb_vision,
)

from vla_rl.plugins.models.gr00t.folder import QwenSizes
from vla_rl.toolkit.models.networks import text_sizes

FRAMES = 2
"""Video frames per patch; an image is repeated as its own next frame."""


class ImageBlock(Qwen3VLVisionBlock):
    """Block of the vision tower, for images of one size."""

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        attention: Any = self.attn
        query, key, value = attention.qkv(self.norm1(x)).unflatten(2, (3, attention.num_heads, -1)).unbind(2)
        query, key = apply_rotary_pos_emb_vision(query, key, *turns)
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        x = x + attention.proj(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class QwenTowers(nn.ModuleDict):
    """Vision tower and language model of N1.7, with the original's parameter names."""

    def __init__(self, sizes: QwenSizes) -> None:
        vision = Qwen3VLVisionConfig(
            depth=sizes.vision_depth,
            hidden_size=sizes.vision_width,
            intermediate_size=sizes.vision_mlp,
            num_heads=sizes.vision_heads,
            patch_size=sizes.patch_size,
            spatial_merge_size=sizes.merge,
            temporal_patch_size=FRAMES,
            out_hidden_size=sizes.text_width,
            num_position_embeddings=sizes.vision_positions,
            deepstack_visual_indexes=list(sizes.deepstack),
        )
        rope: Any = {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_interleaved": True,
            "mrope_section": list(sizes.rope),
        }
        text = Qwen3VLTextConfig(**text_sizes(sizes, sizes.text_depth), rope_parameters=rope)
        text._attn_implementation = "sdpa"
        visual = Qwen3VLVisionModel(vision)
        visual.blocks = nn.ModuleList(ImageBlock(vision) for _ in range(sizes.vision_depth))
        parts = {"visual": visual, "language_model": Qwen3VLTextModel(text)}
        super().__init__({"model": nn.ModuleDict({"model": nn.ModuleDict(parts)})})
        self.sizes = sizes
        self._language.norm.requires_grad_(False)  # in the files, but never used

    @property
    def _visual(self) -> Any:
        model: Any = self["model"]
        return model["model"]["visual"]

    @property
    def _language(self) -> Any:
        model: Any = self["model"]
        return model["model"]["language_model"]

    def see(self, frames: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return tokens [N, T, D] of images [N, 3, 2, S, S] in [-1, 1], and what is added to them after the language
        model's first layers (DeepStack), [N, T, D] each."""
        visual, merge = self._visual, self.sizes.merge
        x = visual.patch_embed.proj(frames)[:, :, 0]
        grid = x.shape[2]
        x = x.unflatten(2, (-1, merge)).unflatten(4, (-1, merge)).permute(0, 2, 4, 3, 5, 1).flatten(1, 4)
        x = x + self._positions(grid)
        turns = visual.rotary_pos_emb(x, _on_device(_patch_positions, x.device, grid, merge))
        deep = []
        for i, block in enumerate(visual.blocks):
            x = block(x, turns)
            if i in self.sizes.deepstack:
                merger = visual.deepstack_merger_list[self.sizes.deepstack.index(i)]
                deep.append(merger(x).unflatten(0, (len(x), -1)))
        return visual.merger(x).unflatten(0, (len(x), -1)), deep

    def _positions(self, grid: int) -> Tensor:
        """Return position embeddings interpolated from the learnt grid, [patches, D]."""
        table, merge = self._visual.pos_embed.weight, self.sizes.merge
        nearest, share = _on_device(_compute_interpolation, table.device, grid, merge, self.sizes.vision_positions)
        positions: Tensor = (table[nearest] * share[..., None]).sum(1).to(table.dtype)
        return positions

    def read(self, frames: Tensor, ids: Tensor, starts: Sequence[int], at: Tensor) -> Tensor:
        """Run the language model on images and prompts [B, P]; return [B, P, D].

        Args:
            frames: [B x cameras, 3, 2, S, S] in [-1, 1].
            starts: index of the first token of each image, the same in all prompts.
            at: indices of all image tokens.
        """
        language = self._language
        tokens, deep = self.see(frames)
        rows = (len(ids), -1, tokens.shape[2])
        x: Tensor = language.embed_tokens(ids).index_copy(1, at, tokens.reshape(rows))
        triples = _on_device(_rope_positions, ids.device, ids.shape[1], tuple(starts), self.sizes.side)
        turns = language.rotary_emb(x, triples[:, None])
        for i, layer in enumerate(language.layers):
            x = layer(x, position_embeddings=turns, attention_mask=None, use_cache=False)
            if i < len(deep):
                x = x.index_add(1, at, deep[i].reshape(rows))
        return x


@lru_cache
def _on_device(table: Callable[..., Any], device: torch.device, *arguments: Any) -> Any:
    """Return a table of numbers on the device, where it is kept: copies from the host stall, in CUDA graphs fail."""
    result = table(*arguments)
    return result.to(device) if isinstance(result, Tensor) else tuple(part.to(device) for part in result)


@lru_cache
def _patch_positions(grid: int, merge: int) -> Tensor:
    """Return row and column of each patch, [patches, 2], in an order in which the patches of one token are adjacent."""
    rows, columns = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
    positions = torch.stack([rows, columns], dim=-1)
    blocks = positions.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))
    result: Tensor = blocks.transpose(1, 2).reshape(-1, 2)
    return result


@lru_cache
def _compute_interpolation(grid: int, merge: int, positions: int) -> tuple[Tensor, Tensor]:
    """Return, for each patch, the four nearest positions of the learnt grid, int64 [patches, 4], and their weights."""
    side = round(positions**0.5)
    line = torch.linspace(0, side - 1, grid)
    low = line.floor().long()
    high, share = (low + 1).clamp(max=side - 1), line - low
    row, column = _patch_positions(grid, merge).unbind(1)
    nearest, shares = [], []
    for row_ends, row_share in ((low, 1 - share), (high, share)):
        for column_ends, column_share in ((low, 1 - share), (high, share)):
            nearest.append(row_ends[row] * side + column_ends[column])
            shares.append(row_share[row] * column_share[column])
    return torch.stack(nearest, dim=1), torch.stack(shares, dim=1)


@lru_cache
def _rope_positions(length: int, starts: tuple[int, ...], side: int) -> Tensor:
    """Return time, row and column of each token for the rotary embedding, int64 [3, length]: text tokens count up, an
    image advances time by its side."""
    triples: list[tuple[int, int, int]] = []
    now = 0
    while len(triples) < length:
        if len(triples) in starts:
            triples += [(now, now + row, now + column) for row in range(side) for column in range(side)]
            now += side
        else:
            triples.append((now, now, now))
            now += 1
    return torch.tensor(triples).T.contiguous()
