"""transformers' pi0 split into its two halves, so that the first runs once and the second at every denoising step.

The prefix (images and instruction) goes through the vision-language model, to whose keys and values the action expert
attends; the suffix is one state token and H action tokens. A token sees its own block and those before it: prefix,
state, actions. A missing camera is left out: pi0 masks it, and positions count only what is not masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from attrs import evolve, frozen
from torch import Tensor
from transformers import PI0Config, PI0ForConditionalGeneration
from transformers.initialization import no_init_weights
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer, GemmaRMSNorm, rotate_half
from transformers.models.siglip.modeling_siglip import SiglipVisionEmbeddings

from vla_rl.toolkit.models.attention import WITH_BLIND_QUERIES, WITH_SHARED_KEYS, added_to_scores, repeat_for_heads
from vla_rl.toolkit.models.decoder import CACHE, LayerCache, LentLayer, RecordedLayer, Rotation, run_layers
from vla_rl.toolkit.models.flow.network import BackboneFeatures, FlowModule, TimeEmbedding, mean_over
from vla_rl.toolkit.models.heads import HorizonValueHead, PrefixValueHead


@frozen(eq=False)
class PiPrefix:
    """Precomputed inputs of the expert from images and instruction."""

    caches: list[LentLayer]
    """Keys and values of each layer."""
    mask: Tensor
    """Mask [B, 1, (1 + H) * heads, P + 1 + H] of `attend_to_shared_keys`, added to attention scores: 0 where a token
    of the suffix sees, else very low. pi0.5 has no state token: H instead of 1 + H."""
    rotation: Rotation
    """Rotary embedding of the suffix's tokens."""
    summary: Tensor | None = None
    """float32 [B, D]: mean of the language model's output, for a critic that reads the prefix."""
    modulations: Sequence[Tensor] | None = None
    """What pi0.5's norms compute from the time alone, float32 [1, 3 D] each; None: they compute it."""

    def with_two_suffixes(self) -> PiPrefix:
        """Return the prefix for a pass with two suffixes of each sample, all samples one after the other."""
        cosine, sine = self.rotation
        return evolve(self, mask=_twice(self.mask), rotation=(_twice(cosine), _twice(sine)))


def _twice(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor])


class LastLayer(GemmaDecoderLayer):
    """Last layer of the language model. The expert attends to its keys and values, and most policies read nothing else
    of it, so that nothing else is computed."""

    output_read = False

    def forward(  # type: ignore[override]  # only Pi0Module calls it
        self, hidden: Tensor, *, position_embeddings: Rotation, **attention: Any
    ) -> Tensor:
        if self.output_read:
            result: Tensor = super().forward(hidden, position_embeddings=position_embeddings, **attention)
            return result
        attend = self.self_attn
        normed = self.input_layernorm(hidden)
        keys, values = (
            part(normed).unflatten(-1, (-1, attend.head_dim)).transpose(1, 2) for part in (attend.k_proj, attend.v_proj)
        )
        cosine, sine = (factor.unsqueeze(1) for factor in position_embeddings)
        cache: LayerCache = attention[CACHE]
        cache.update(keys * cosine + rotate_half(keys) * sine, values, attend.layer_idx)
        return hidden


class _Layout(NamedTuple):
    """Sequence of the prefix, and what attention takes of it."""

    embeds: Tensor
    """[B, P, D]."""
    valid: Tensor
    """bool [B, P], False where masked."""
    mask: Tensor
    """Mask [B, 1, 1 or P, P] of the prefix, as in `PiPrefix`."""
    rotation: Rotation


def empty_network(config: PI0Config) -> PI0ForConditionalGeneration:
    """Return the network with uninitialised memory, for `networks.fill_network` or `networks.allocate_network`."""
    with no_init_weights():
        network = PI0ForConditionalGeneration(config)
    embed: Any = network.embed_action_time
    dit: Any = config.dit_config
    embed.sinusoid_embeds = TimeEmbedding(dit.hidden_size, config.min_period, config.max_period)
    network.model.dit.embed_tokens.requires_grad_(False)  # in the files, but never used
    language: Any = network.model.vlm.language_model
    language.config._attn_implementation = WITH_BLIND_QUERIES
    network.model.dit.config._attn_implementation = WITH_SHARED_KEYS
    last = len(language.layers) - 1
    with no_init_weights():
        language.layers[last] = LastLayer(language.config, last)
    return network


class Pi0Module(FlowModule):
    """Network with all parameters of a policy."""

    state_tokens = 1
    pads = False
    """Whether the critic's mean includes the prompt's padding, as RLinf's of pi0.5 does."""

    def __init__(self, pi0: PI0ForConditionalGeneration, *heads: Any) -> None:
        super().__init__((pi0.config.chunk_size, pi0.config.max_action_dim), *heads)
        self.pi0 = pi0
        self._dtype = pi0.model.dit.layers[0].self_attn.q_proj.weight.dtype
        self._summarises = isinstance(self.value_head, PrefixValueHead)
        pi0.model.vlm.language_model.layers[-1].output_read = self._summarises

    @property
    def network(self) -> PI0ForConditionalGeneration:
        return self.pi0

    def run_backbone(self, pixels: Tensor, ids: Tensor, mask: Tensor, shown: Tensor | None = None) -> BackboneFeatures:
        """Run the vision-language model.

        Args:
            pixels: [B, cameras, 3, S, S] in [-1, 1].   ids: prompts, int64 [B, L].
            mask: bool [B, L], False at padding.   shown: bool [B, cameras], False where masked; None: all visible.
        """
        language = self.pi0.model.vlm.language_model
        layout = self.lay_out(self.embed_images(pixels), ids, mask, shown)
        recorded = [RecordedLayer() for _ in language.layers]
        hidden = run_layers(
            language,
            layout.embeds,
            layout.mask.expand(-1, 1, layout.embeds.shape[1], -1),
            layout.rotation,
            recorded,
            normed=self._summarises,
            blind_queries=self.pads,
        )
        return BackboneFeatures(
            layout.valid,
            [(layer.keys, layer.values) for layer in recorded],
            mean_over(hidden, self._select_counted(layout.valid, ids.shape[1])) if self._summarises else None,
        )

    def build_prefix(self, seen: BackboneFeatures, state: Tensor) -> PiPrefix:
        """Return the expert's inputs. `state` is unused: it is a token of the suffix, or in the prompt."""
        mask, rotation = self.lay_out_suffix(seen.valid)
        return PiPrefix([LentLayer(*pair) for pair in seen.pairs], mask, rotation, seen.hidden)

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Return features [B, cameras, N, D] of images [B, cameras, 3, S, S] in [-1, 1]."""
        features: Tensor = self.pi0.model.vlm.get_image_features(pixels.flatten(0, 1)).pooler_output
        by_camera: Tensor = features.unflatten(0, pixels.shape[:2])
        return by_camera

    def lay_out(self, features: Tensor, ids: Tensor, mask: Tensor, shown: Tensor | None) -> _Layout:
        """Lay out features [B, cameras, N, D] and prompts as one sequence; else as `run_backbone`."""
        rows, cameras, patches = features.shape[:3]
        language = self.pi0.model.vlm.language_model
        text = language.embed_tokens(ids)
        embeds = torch.cat([features.flatten(1, 2).to(text.dtype), text], dim=1)
        shown = mask.new_ones(rows, cameras) if shown is None else shown
        valid = torch.cat([shown[:, :, None].expand(-1, -1, patches).flatten(1), mask], dim=1)
        return _Layout(
            embeds=embeds,
            valid=valid,
            mask=self._mask_scores(self._attention_mask(valid)),
            rotation=language.rotary_emb(embeds, position_ids=valid.cumsum(1) - 1),
        )

    def lay_out_suffix(self, valid: Tensor) -> tuple[Tensor, Rotation]:
        """Return mask and rotation, as in `PiPrefix`, of the suffix that follows a prefix; valid: bool [B, P]."""
        tokens = self.state_tokens + self.pi0.config.chunk_size
        order = torch.arange(tokens, device=valid.device)
        among = (order[:, None] >= self.state_tokens) | (order < self.state_tokens)  # states do not see the actions
        suffix = torch.cat([valid[:, None].expand(-1, tokens, -1), among.expand(len(valid), -1, -1)], dim=2)[:, None]
        positions = valid.sum(1, keepdim=True) + order
        rotation = self.pi0.model.dit.rotary_emb(valid.new_empty(0, dtype=self._dtype), position_ids=positions)
        groups = self.pi0.model.dit.layers[0].self_attn.num_key_value_groups
        return repeat_for_heads(self._mask_scores(suffix), groups), rotation

    def _attention_mask(self, valid: Tensor) -> Tensor:
        """Return the mask [B, 1, P or 1, P] of prefix tokens that each prefix token attends to, from bool [B, P].
        Padding that is counted is computed as in openpi: it attends to all tokens equally."""
        mask = valid[:, None, None, :]
        return valid[:, None, :, None] & mask if self.pads else mask

    def _select_counted(self, valid: Tensor, prompt: int) -> Tensor:
        """Return which tokens the critic's mean includes; the last `prompt` of them are the instruction."""
        return torch.cat([valid[:, :-prompt], torch.ones_like(valid[:, -prompt:])], 1) if self.pads else valid

    def _mask_scores(self, seen: Tensor) -> Tensor:
        return added_to_scores(seen, self._dtype)

    def run_expert(self, prefix: PiPrefix, state: Tensor, x: Tensor, time: Tensor) -> Tensor:
        embeds = self._embed_suffix(state, x, time)
        hidden = run_layers(self.pi0.model.dit, embeds, prefix.mask, prefix.rotation, prefix.caches)
        result: Tensor = hidden[:, 1:].float()
        return result

    def run_expert_and_critic(
        self, prefix: PiPrefix, state: Tensor, x: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `run_expert` and `estimate_values` do, in one pass where the critic takes one and its gradient
        reaches the expert: on a GPU the host, which launches the layers, is the limit."""
        head = self.value_head
        if not isinstance(head, HorizonValueHead) or head.passes > 1 or head.detach:
            return super().run_expert_and_critic(prefix, state, x, time)
        noisy, times = torch.cat([x, torch.zeros_like(x)]), torch.cat([time, torch.ones_like(time)])
        hidden, of_mean = self.run_expert(prefix.with_two_suffixes(), _twice(state), noisy, times).chunk(2)
        return hidden, head(of_mean)

    def _embed_suffix(self, state: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """Return the embeddings [B, 1 + H, D] of state, noisy actions and time."""
        result: Tensor = self.pi0.embed_action_time(state, x, time).to(self._dtype)
        return result

    def project_velocity(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.pi0.action_out_proj(hidden)
        return result

    regions: tuple[Callable[..., Any], ...] = (
        lay_out,
        lay_out_suffix,
        _embed_suffix,
        GemmaRMSNorm.forward,
        SiglipVisionEmbeddings.forward,
    )
    """Methods to compile besides the blocks."""


def stays_float32(name: str) -> bool:
    """Return whether a parameter stays in float32: RMS norms of the towers, and the projections of state, time and
    actions, as in openpi."""
    return not name.startswith("model.") or ("norm" in name and ".vision_tower." not in name)
