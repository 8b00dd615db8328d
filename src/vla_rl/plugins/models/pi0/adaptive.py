"""pi0.5's action expert (Black et al. 2025, arXiv 2504.16054): Gemma's layers with adaptive norms, conditioned on time.
Differences to pi0: no state token, action tokens without the time, and norms whose scale, shift and gate are linear in
an embedding of the time. The prefix is pi0's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PI0Config, PI0ForConditionalGeneration
from transformers.initialization import no_init_weights
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer, GemmaModel
from transformers.models.siglip.modeling_siglip import SiglipVisionEmbeddings

from vla_rl.plugins.models.pi0.network import Pi0Module, PiPrefix, empty_network
from vla_rl.toolkit.models.decoder import CACHE
from vla_rl.toolkit.models.flow.network import BackboneFeatures, TimeEmbedding, initialise_flow

SLOTS = 3
"""Number of images in pi0's training: base, left wrist, right wrist."""


class AdaptiveNorm(nn.Module):
    """Adaptive RMS norm in float32: times 1 + scale, plus shift. Its `gate` multiplies the sub-layer that follows."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised x [B, T, D] and the gate [B, 1, D], in x's precision, for a condition float32 [B, D],
        or what `dense` makes of one, [1, 3 D]."""
        modulation = self.dense(condition) if condition.shape[1] == x.shape[2] else condition
        scale, shift, gate = modulation[:, None].chunk(3, dim=-1)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + scale) + shift).to(x.dtype), gate.to(x.dtype)


class AdaptiveLayer(GemmaDecoderLayer):
    """Gemma layer of the expert with adaptive norms."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.input_layernorm: Any = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm: Any = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)

    def forward(  # type: ignore[override]  # only AdaptiveExpert calls it
        self, hidden: Tensor, conditions: tuple[Tensor, Tensor], **attention: Any
    ) -> Tensor:
        normed, gate = self.input_layernorm(hidden, conditions[0])
        hidden = hidden + gate * self.self_attn(hidden_states=normed, **attention)[0]
        normed, gate = self.post_attention_layernorm(hidden, conditions[1])
        result: Tensor = hidden + gate * self.mlp(normed)
        return result


class AdaptiveExpert(nn.Module):
    """All layers of the expert, built from pi0's expert."""

    def __init__(self, plain: GemmaModel) -> None:
        super().__init__()
        config = plain.config
        self.embed_tokens = plain.embed_tokens
        self.layers = nn.ModuleList(AdaptiveLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = plain.rotary_emb

    @property
    def norms(self) -> list[Any]:
        """Norms in the order in which they are computed."""
        pairs = ((layer.input_layernorm, layer.post_attention_layernorm) for layer in self.layers)
        return [*chain.from_iterable(pairs), self.norm]

    def forward(self, hidden: Tensor, conditions: Sequence[Tensor], prefix: PiPrefix) -> Tensor:
        """Return the output [B, T, D] for embeddings [B, T, D]. `conditions`: each norm's, as for `AdaptiveNorm`."""
        of_layers = zip(conditions[:-1:2], conditions[1::2], strict=True)
        for layer, cache, of_layer in zip(self.layers, prefix.caches, of_layers, strict=True):
            hidden = layer(
                hidden,
                of_layer,
                attention_mask=prefix.mask,
                position_embeddings=prefix.rotation,
                **{CACHE: cache},
            )
        result: Tensor = self.norm(hidden, conditions[-1])[0]
        return result


class TimeCondition(nn.Module):
    """Embedding of the time, which replaces pi0's embedding of state, actions and time."""

    def __init__(self, config: PI0Config) -> None:
        super().__init__()
        dit: Any = config.dit_config
        width: int = dit.hidden_size
        self.sinusoid_embeds = TimeEmbedding(width, config.min_period, config.max_period)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    def forward(self, time: Tensor) -> Tensor:
        """Return the condition of the norms, float32 [B, D], for times [B]."""
        return F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(self.sinusoid_embeds(time)))))


def empty_adaptive(config: PI0Config) -> PI0ForConditionalGeneration:
    """Return the network with pi0.5's expert and uninitialised memory, like `empty_network`."""
    network = empty_network(config)
    parts: Any = network
    with no_init_weights():
        parts.embed_action_time = TimeCondition(config)
        parts.model.dit = AdaptiveExpert(network.model.dit)
    return network


@torch.no_grad()
def initialise_adaptive(network: PI0ForConditionalGeneration, seed: int) -> None:
    """Initialise random weights. Norms start at scale 0 and shift 0, as in openpi, but at gate 1: with openpi's 0 every
    layer starts as the identity, and its attention and MLP get no gradient."""
    initialise_flow(network, seed, rms=0.0)
    for part in network.modules():
        if isinstance(part, AdaptiveNorm):
            part.dense.weight.zero_()
            part.dense.bias.view(3, -1).copy_(torch.tensor([0.0, 0.0, 1.0])[:, None])


class Pi05Module(Pi0Module):
    """Network with all parameters of a pi0.5 policy."""

    state_tokens = 0

    def run_backbone(self, pixels: Tensor, ids: Tensor, mask: Tensor, shown: Tensor | None = None) -> BackboneFeatures:
        if self.pads and shown is None:
            pixels, shown = _pad_cameras(pixels)
        return super().run_backbone(pixels, ids, mask, shown)

    def run_expert(self, prefix: PiPrefix, state: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Return the expert's output for noisy actions x at `time`. `state` is unused: the prompt contains it."""
        expert, conditions = self.pi0.model.dit, prefix.modulations
        if conditions is None:
            embeds, condition = self._embed_suffix(x, time)
            conditions = [condition] * len(expert.norms)
        else:
            embeds = self.pi0.embed_action_time.action_in_proj(x).to(self._dtype)
        result: Tensor = expert(embeds, conditions, prefix).float()
        return result

    def prepare_steps(self, prefix: PiPrefix, times: Tensor) -> Sequence[PiPrefix]:
        """Let one product of each norm serve all passes: it reads 12 MB of weights, whatever the number of times."""
        condition = self.pi0.embed_action_time(times)
        by_norm = [norm.dense(condition).split(1) for norm in self.pi0.model.dit.norms]
        return [evolve(prefix, modulations=of_step) for of_step in zip(*by_norm, strict=True)]

    def _embed_suffix(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # no state
        """Return the embeddings [B, H, D] of noisy actions, and the condition of the norms."""
        embed = self.pi0.embed_action_time
        return embed.action_in_proj(x).to(self._dtype), embed(time)

    regions = (
        Pi0Module.lay_out,
        Pi0Module.lay_out_suffix,
        _embed_suffix,
        AdaptiveNorm.forward,
        SiglipVisionEmbeddings.forward,
    )


def _pad_cameras(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return images with black, masked ones appended up to the number of the model's cameras, and bool [B, cameras],
    False for masked ones. Padding tokens attend to masked images as well."""
    rows, count = pixels.shape[:2]
    is_camera = torch.arange(max(SLOTS, count), device=pixels.device).expand(rows, -1) < count
    black = pixels.new_full((rows, is_camera.shape[1] - count, *pixels.shape[2:]), -1.0)
    return torch.cat([pixels, black], dim=1), is_camera
