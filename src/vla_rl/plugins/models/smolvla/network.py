"""SmolVLA's network, built from transformers' modules: SmolVLM's vision tower and connector, and layers of Llama.

The prefix (images, instruction, then one token of the state) goes through the language model. Images and instruction
do not see the state, so they are computed separately, without gradient where they are not trained. The expert's tokens
are the noisy actions, each of which sees those before it. In its even layers they attend to the prefix's keys and
values and to their own, in its odd ones to projections of the prefix's alone. Rotary embeddings are lerobot's: base
10,000. A missing camera is left out: lerobot masks it, and positions count only what is not masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel, SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.initialization import no_init_weights
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from vla_rl.plugins.models.smolvla.folder import SmolVLASizes
from vla_rl.toolkit.models.attention import added_to_scores, attend_to_shared_keys, repeat_for_heads
from vla_rl.toolkit.models.flow.checkpoint import FlowShape
from vla_rl.toolkit.models.flow.network import BackboneFeatures, FlowModule, TimeEmbedding, mean_over
from vla_rl.toolkit.models.heads import PrefixValueHead
from vla_rl.toolkit.models.networks import text_sizes, vision_sizes

BASE = 10_000.0
Pair = tuple[Tensor, Tensor]
"""Rotated keys and values, [B, kv heads, T, D]."""
Rotation = tuple[Tensor, Tensor]
"""Cosines, and sines with their signs: see `rotary_factors`."""


@frozen(eq=False)
class SmolVLAPrefix:
    """Precomputed inputs of the expert that do not change with time."""

    pairs: list[Pair]
    """Keys and values of each layer that the action tokens attend to, the state included; in odd layers after the
    expert's own projections."""
    own: Tensor
    """Mask [B, 1, H * groups, P + 1 + H] of `attend_to_shared_keys`, added to the attention scores of even layers."""
    across: Tensor
    """Mask [B, 1, 1, P + 1], added to the attention scores of odd layers."""
    turns: tuple[Pair, Pair]
    """Rotations of the action tokens in even and odd layers."""
    summary: Tensor | None
    """float32 [B, D]: mean of the language model's output, for a critic that reads the prefix."""


def apply_rotary(x: Tensor, by: Rotation) -> Tensor:
    """Apply the rotary embedding to x [B, heads, T, D], pairing the two halves of D."""
    wide = x.float()
    return torch.addcmul(wide * by[0], wide.roll(x.shape[-1] // 2, -1), by[1]).to(x.dtype)


def apply_rms_norm(norm: Any, x: Tensor) -> Tensor:
    """Return the RMS norm of x, computed in float32 whatever the precision of x."""
    return F.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.variance_epsilon).to(x.dtype)


def join_pairs(one: Pair, two: Pair) -> Pair:
    keys, values = (torch.cat(parts, dim=2) for parts in zip(one, two, strict=True))
    return keys, values


class _Layer(LlamaDecoderLayer):
    """Parts of a Llama layer."""

    def _split_heads(self, x: Tensor) -> Tensor:
        """Return x [B, T, heads D] as [B, heads, T, D]."""
        result: Tensor = x.unflatten(2, (-1, self.self_attn.head_dim)).transpose(1, 2)
        return result

    def _compute_queries(self, base: Tensor, by: Rotation) -> Tensor:
        return apply_rotary(self._split_heads(self.self_attn.q_proj(base)), by)

    def _compute_pair(self, base: Tensor, by: Rotation) -> Pair:
        keys, values = (self._split_heads(part(base)) for part in (self.self_attn.k_proj, self.self_attn.v_proj))
        return apply_rotary(keys, by), values

    def _run_attention(self, x: Tensor, queries: Tensor, pair: Pair, mask: Tensor) -> Tensor:
        """Run the rest of the layer: attention of queries [B, heads, T, D], and the MLP. Scores are float32."""
        keys, values = pair
        attended = attend_to_shared_keys(queries.float(), keys.float(), values.float(), mask)
        x = x + self.self_attn.o_proj(attended.flatten(2).to(x.dtype))
        result: Tensor = x + self.mlp(apply_rms_norm(self.post_attention_layernorm, x))
        return result


class TextLayer(_Layer):
    """Layer of the language model."""

    def forward(  # type: ignore[override]  # only SmolVLAModule calls it
        self, x: Tensor, by: Rotation, mask: Tensor, before: Pair | None
    ) -> tuple[Tensor, Pair]:
        """Return the output for tokens x [B, T, D] that follow those of `before`, and all keys and values."""
        base = apply_rms_norm(self.input_layernorm, x)
        pair = self._compute_pair(base, by)
        if before is not None:
            pair = join_pairs(before, pair)
        return self._run_attention(x, self._compute_queries(base, by), pair, mask), pair


class ExpertLayer(_Layer):
    """Layer of the expert, in which action tokens attend to the prefix and to each other."""

    def forward(  # type: ignore[override]  # only SmolVLAModule calls it
        self, x: Tensor, pair: Pair, by: Rotation, mask: Tensor
    ) -> Tensor:
        base = apply_rms_norm(self.input_layernorm, x)
        queries = self._split_heads(self.self_attn.q_proj(base))
        pair = join_pairs(pair, self._compute_pair(base, by))
        return self._run_attention(x, apply_rotary(queries, by), pair, mask)


class CrossAttentionLayer(_Layer):
    """Layer of the expert, in which action tokens attend to projections of the prefix's keys and values alone."""

    def forward(  # type: ignore[override]  # only SmolVLAModule calls it
        self, x: Tensor | None, pair: Pair, by: Rotation | None = None, mask: Tensor | None = None
    ) -> Any:
        """Return the output [B, H, D] for action tokens x, given projected keys and values, the rotation `by` and an
        additive mask. Without x: project the prefix's `pair`, once an observation; by `forward`, since FSDP gathers the
        weights there."""
        if x is None:
            keys, values = (part.transpose(1, 2).flatten(2) for part in pair)
            return self._split_heads(self.self_attn.k_proj(keys)), self._split_heads(self.self_attn.v_proj(values))
        assert by is not None
        assert mask is not None
        base = apply_rms_norm(self.input_layernorm, x)
        return self._run_attention(x, self._compute_queries(base, by), pair, mask)


class VLMWithExpert(nn.Module):
    """Language model and expert, with lerobot's parameter names."""

    def __init__(self, sizes: SmolVLASizes) -> None:
        super().__init__()
        text: dict[str, Any] = {"rms_norm_eps": 1e-5, **text_sizes(sizes, sizes.depth)}
        config = SmolVLMConfig(
            text_config={"model_type": "llama", "pad_token_id": 0, **text},
            vision_config=vision_sizes(sizes),
            scale_factor=sizes.shuffle,
        )
        self.vlm = SmolVLMForConditionalGeneration(config)
        self._replace_layers(self.vlm.model.text_model, lambda i: TextLayer)
        expert = {**text, "hidden_size": sizes.expert_width, "intermediate_size": sizes.expert_mlp}
        self.lm_expert: Any = LlamaModel(LlamaConfig(**expert))
        del self.lm_expert.embed_tokens
        self._replace_layers(self.lm_expert, lambda i: CrossAttentionLayer if i % sizes.alternate else ExpertLayer)
        wide = sizes.kv_heads * sizes.head_dim
        for i, layer in enumerate(self.lm_expert.layers):
            if i % sizes.alternate:
                attention: Any = layer.self_attn
                attention.k_proj = nn.Linear(wide, wide, bias=False)
                attention.v_proj = nn.Linear(wide, wide, bias=False)

    @staticmethod
    def _replace_layers(model: Any, kind: Callable[[int], type[LlamaDecoderLayer]]) -> None:
        count = model.config.num_hidden_layers
        model.layers = nn.ModuleList(kind(i)(model.config, i) for i in range(count))


class SmolVLANetwork(nn.Module):
    """Network with the parameters that a checkpoint holds."""

    def __init__(self, sizes: SmolVLASizes, shape: FlowShape) -> None:
        super().__init__()
        width = sizes.expert_width
        self.sizes = sizes
        self.vlm_with_expert = VLMWithExpert(sizes)
        self.state_proj = nn.Linear(shape.state_dim, sizes.text_width)
        self.action_in_proj = nn.Linear(shape.action_dim, width)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        self.action_out_proj = nn.Linear(width, shape.action_dim)
        self.time = TimeEmbedding(width, shape.min_period, shape.max_period)


def empty_network(sizes: SmolVLASizes, shape: FlowShape) -> SmolVLANetwork:
    """Return the network with uninitialised memory, for `networks.fill_network` or `networks.allocate_network`."""
    with no_init_weights():
        network = SmolVLANetwork(sizes, shape)
    network.vlm_with_expert.vlm.lm_head.requires_grad_(False)  # in the files, but never used
    return network


def rotary_factors(positions: Tensor, dim: int) -> Rotation:
    """Return cosines, and sines with their signs, float32 [B, 1, T, dim]: the factors of `apply_rotary`."""
    exponents = (2.0 / dim) * torch.arange(dim // 2, dtype=torch.float32, device=positions.device)
    angle = (positions[..., None].float() / BASE**exponents)[:, None]
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)


class SmolVLAModule(FlowModule):
    """Network with all parameters of a policy."""

    def __init__(self, smolvla: SmolVLANetwork, shape: tuple[int, int], *heads: Any) -> None:
        super().__init__(shape, *heads)
        self.smolvla = smolvla
        self._dim = smolvla.sizes.head_dim
        self._dtype = smolvla.vlm_with_expert.lm_expert.layers[0].self_attn.q_proj.weight.dtype

    @property
    def network(self) -> SmolVLANetwork:
        return self.smolvla

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Return tokens [N, tokens, D] of images [N, 3, S, S] in [-1, 1]."""
        vlm = self.smolvla.vlm_with_expert.vlm.model
        tower = vlm.vision_model
        x = tower.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        x = x + tower.embeddings.position_embedding.weight  # images are whole: no position look-up per patch
        result: Tensor = vlm.connector(tower.post_layernorm(tower.encoder(inputs_embeds=x).last_hidden_state))
        return result

    def embed_prefix(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Return embeddings [B, P, D] of images [B, cameras, 3, S, S] in [-1, 1], camera by camera, then of the L
        tokens of prompts int64 [B, L]."""
        text = self.smolvla.vlm_with_expert.vlm.model.text_model.embed_tokens(ids)
        features = self.embed_images(pixels.flatten(0, 1)).reshape(len(ids), -1, text.shape[2])
        # lerobot scales embeddings of images and of text alike.
        result: Tensor = torch.cat([features, text], dim=1) * text.shape[2] ** 0.5
        return result

    def run_backbone(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> BackboneFeatures:
        """Run the language model on `embed_prefix`'s inputs; mask: bool [B, L], False at padding."""
        embeds = self.embed_prefix(pixels, ids)
        rows, length = embeds.shape[:2]
        valid = torch.cat([mask.new_ones(rows, length - ids.shape[1]), mask], dim=1)
        hidden, pairs = self._run_language_model(
            embeds, valid.cumsum(1) - 1, self._mask_scores(valid[:, None, None]), None
        )
        return BackboneFeatures(valid, pairs, hidden if isinstance(self.value_head, PrefixValueHead) else None)

    def build_prefix(self, seen: BackboneFeatures, state: Tensor) -> SmolVLAPrefix:
        """Return the prefix with the normalised state [B, S] added, projected for the odd layers of the expert."""
        token = self.smolvla.state_proj(state)[:, None].to(self._dtype)
        valid = torch.cat([seen.valid, seen.valid.new_ones(len(state), 1)], dim=1)
        across = self._mask_scores(valid[:, None, None])
        count = valid.sum(1, keepdim=True)
        state_hidden, pairs = self._run_language_model(token, count - 1, across, seen.pairs)
        horizon, device = self.shape[0], state.device
        before = torch.ones(horizon, horizon, dtype=torch.bool, device=device).tril().expand(len(state), -1, -1)
        causal = torch.cat([valid[:, None].expand(-1, horizon, -1), before], dim=2)[:, None]
        ahead = torch.arange(horizon, device=device)[None]
        expert = self.smolvla.vlm_with_expert.lm_expert.layers
        for i, layer in enumerate(expert):
            if self._is_cross_attention(i):
                pairs[i] = layer(None, pairs[i])
        summary = None
        if seen.hidden is not None:
            summary = mean_over(torch.cat([seen.hidden, state_hidden], dim=1), valid)
        rotations = rotary_factors(count + ahead, self._dim), rotary_factors(ahead, self._dim)
        sizes = self.smolvla.sizes
        own = repeat_for_heads(self._mask_scores(causal), sizes.heads // sizes.kv_heads)
        return SmolVLAPrefix(pairs, own, across, rotations, summary)

    def run_expert(self, prefix: SmolVLAPrefix, state: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Return the expert's output for noisy actions x at `time`. `state` is unused: the prefix contains it."""
        net = self.smolvla
        embed = net.action_in_proj(x)
        embedded = torch.cat([embed, net.time(time)[:, None].expand_as(embed)], dim=2)
        hidden = net.action_time_mlp_out(F.silu(net.action_time_mlp_in(embedded))).to(self._dtype)
        expert = net.vlm_with_expert.lm_expert
        for i, (layer, pair) in enumerate(zip(expert.layers, prefix.pairs, strict=True)):
            if self._is_cross_attention(i):
                hidden = layer(hidden, pair, prefix.turns[1], prefix.across)
            else:
                hidden = layer(hidden, pair, prefix.turns[0], prefix.own)
        return apply_rms_norm(expert.norm, hidden).float()

    def project_velocity(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.smolvla.action_out_proj(hidden)
        return result

    # ------------------------------------------------------------------------------------------------ layers

    def _run_language_model(
        self, x: Tensor, positions: Tensor, mask: Tensor, before: Sequence[Pair] | None
    ) -> tuple[Tensor, list[Pair]]:
        """Run the language model on tokens x [B, T, D] after those of `before`. Return output, keys and values."""
        text = self.smolvla.vlm_with_expert.vlm.model.text_model
        by, pairs = rotary_factors(positions, self._dim), []
        for i, layer in enumerate(text.layers):
            x, pair = layer(x, by, mask, None if before is None else before[i])
            pairs.append(pair)
        return apply_rms_norm(text.norm, x), pairs

    def _is_cross_attention(self, i: int) -> bool:
        return i % self.smolvla.sizes.alternate != 0

    def _mask_scores(self, mask: Tensor) -> Tensor:
        return added_to_scores(mask, torch.float32)


def stays_float32(name: str) -> bool:
    """Return whether a parameter stays in float32: RMS norms, and the projections of state, time and actions."""
    return not name.startswith("vlm_with_expert.") or ("norm" in name and ".vision_model." not in name)
