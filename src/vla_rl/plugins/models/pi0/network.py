"""transformers' pi0 split into its two halves, so that the first runs once and the second at every denoising step.

The prefix (images and instruction) goes through the vision-language model, whose keys and values the action expert
attends to; the suffix is one state token and H action tokens. A token sees its own block and those before it: prefix,
state, actions. A camera that is not there is left out: pi0 masks it, and positions count only what is not masked.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import PI0Config, PI0ForConditionalGeneration
from transformers.cache_utils import DynamicCache
from transformers.initialization import no_init_weights

from vla_rl.toolkit.models import networks
from vla_rl.toolkit.models.heads import HorizonValueHead, NoiseHead
from vla_rl.toolkit.models.networks import Normal, sine_cosine_positions


class TimeEmbedding(nn.Module):
    """Sines and cosines of the time in float64, as openpi and lerobot have it; transformers' own are float32, which
    moves the samples by 1e-4."""

    def __init__(self, config: PI0Config) -> None:
        super().__init__()
        self.pairs = config.dit_config.hidden_size // 2
        self.low, self.high = config.min_period, config.max_period

    def forward(self, time: Tensor) -> Tensor:
        """float [B] -> float32 [B, D]."""
        fraction = torch.linspace(0, 1, self.pairs, dtype=torch.float64, device=time.device)
        angle = time.double()[:, None] * (2 * math.pi / (self.low * (self.high / self.low) ** fraction))
        return torch.cat([angle.sin(), angle.cos()], dim=1).float()


class _Lent(DynamicCache):
    """The prefix's keys and values, lent to one pass after the other: the suffix is seen and not kept, so nothing has
    to be cropped and no pass holds another one's graph."""

    def __init__(self, source: DynamicCache) -> None:
        super().__init__()
        self.pairs = [(layer.keys, layer.values) for layer in source.layers]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.pairs[layer_idx]
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)


@frozen(eq=False)
class Prefix:
    """What the expert needs of images and instruction."""

    cache: _Lent
    mask: Tensor
    """[B, 1, 1 + H, P + 1 + H], added to attention scores: 0 where a token of the suffix sees, else very low."""
    positions: Tensor
    """int64 [B, 1 + H], of the suffix's tokens."""


def empty_network(config: PI0Config) -> PI0ForConditionalGeneration:
    """The network with memory that is not initialised, for `networks.fill` or `networks.allocate`."""
    with no_init_weights():
        network = PI0ForConditionalGeneration(config)
    network.embed_action_time.sinusoid_embeds = TimeEmbedding(config)
    network.model.dit.embed_tokens.requires_grad_(False)  # in the files, and never computed
    return network


class Pi0Module(nn.Module):
    """All parameters of a policy."""

    def __init__(
        self,
        pi0: PI0ForConditionalGeneration,
        value_head: HorizonValueHead | None = None,
        noise_head: NoiseHead | None = None,
    ) -> None:
        super().__init__()
        self.pi0, self.value_head, self.noise_head = pi0, value_head, noise_head
        self._dtype = pi0.model.dit.layers[0].self_attn.q_proj.weight.dtype

    def embed_prefix(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """[B, cameras, 3, S, S] in [-1, 1] and int64 [B, L] -> [B, P, D]."""
        vlm = self.pi0.model.vlm
        features = vlm.get_image_features(pixels.flatten(0, 1)).pooler_output
        text = vlm.get_input_embeddings()(ids)
        return torch.cat([features.reshape(len(ids), -1, text.shape[2]).to(text.dtype), text], dim=1)

    def see(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Prefix:
        """Run the vision-language model on `embed_prefix`'s inputs; mask: bool [B, L], False at padding."""
        embeds = self.embed_prefix(pixels, ids)
        rows, length = embeds.shape[:2]
        mask = torch.cat([mask.new_ones(rows, length - ids.shape[1]), mask], dim=1)
        cache = DynamicCache()
        self.pi0.model.vlm.language_model(
            inputs_embeds=embeds,
            attention_mask=self._scores(mask[:, None, None, :]).expand(-1, 1, length, -1),
            position_ids=mask.cumsum(1) - 1,
            past_key_values=cache,
            use_cache=True,
        )
        tokens = 1 + self.pi0.config.chunk_size
        among = mask.new_ones(tokens, tokens)
        among[0, 1:] = False  # the state does not see the actions
        return Prefix(
            _Lent(cache),
            self._scores(torch.cat([mask[:, None].expand(-1, tokens, -1), among.expand(rows, -1, -1)], dim=2)[:, None]),
            mask.sum(1, keepdim=True) + torch.arange(tokens, device=mask.device),
        )

    def _scores(self, seen: Tensor) -> Tensor:
        """bool -> what is added to attention scores, once for all layers and steps."""
        return torch.zeros_like(seen, dtype=self._dtype).masked_fill(~seen, torch.finfo(self._dtype).min)

    def denoise(self, prefix: Prefix, state: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """The expert's output for the action tokens.

        Args:
            state: normalised [B, S].   x: noisy actions [B, H, A].   time: [B], 1 for noise, 0 for actions.
        Returns: float32 [B, H, D].
        """
        hidden = self.pi0.model.dit(
            inputs_embeds=self.pi0.embed_action_time(state, x, time).to(self._dtype),
            attention_mask=prefix.mask,
            position_ids=prefix.positions,
            past_key_values=prefix.cache,
            use_cache=False,
        ).last_hidden_state
        return hidden[:, 1:].float()

    def velocity(self, hidden: Tensor) -> Tensor:
        """[B, H, D] -> [B, H, A]: from actions to noise."""
        return self.pi0.action_out_proj(hidden)

    def flow_matching(self, prefix: Prefix, state: Tensor, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Squared errors [B, H, A] of the velocity at these times ([B]), for normalised actions."""
        t = time[:, None, None]
        velocity = self.velocity(self.denoise(prefix, state, t * noise + (1 - t) * actions, time))
        return (noise - actions - velocity) ** 2

    def criticise(self, prefix: Prefix, state: Tensor) -> Tensor | None:
        """Values [B] or [B, C], or None without a critic.

        The expert reads the mean of the initial noise (x = 0 at t = 1), so that values depend on the observation
        alone; RLinf averages over the noisy chunks of the denoising steps instead.
        """
        if self.value_head is None:
            return None
        config = self.pi0.config
        x = state.new_zeros(len(state), config.chunk_size, config.max_action_dim)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.value_head.detach):
            hidden = self.denoise(prefix, state, x, state.new_ones(len(state)))
        return self.value_head(hidden)


def freeze_unused(pi0: PI0ForConditionalGeneration) -> None:
    """Parts of the vision-language model behind its last keys and values: computed, and without influence."""
    language = pi0.model.vlm.language_model
    last = language.layers[-1]
    for part in (last.self_attn.q_proj, last.self_attn.o_proj, last.mlp, last.post_attention_layernorm, language.norm):
        part.requires_grad_(False)


def stays_float32(name: str) -> bool:
    """Of the parameters: RMS norms of the towers and the projections of state, time and actions, as in openpi."""
    return not name.startswith("model.") or ("norm" in name and ".vision_tower." not in name)


def initialise(network: nn.Module, seed: int) -> None:
    """Random weights by `networks.initialise`: sine-cosine patch positions of a size that is seen beside the patches, a
    velocity that starts near 0."""

    def other(name: str, module: nn.Module, normal: Normal) -> None:
        if name.endswith("position_embedding"):
            module.weight.copy_(0.5 * sine_cosine_positions(*module.weight.shape))
        elif isinstance(module, nn.Embedding):  # Gemma multiplies by the root of the width
            normal(module.weight, 0.5 * module.embedding_dim**-0.5)
        elif isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
        elif type(module).__name__.endswith("RMSNorm"):
            module.weight.zero_()  # Gemma's norm multiplies by 1 + weight

    networks.initialise(network, seed, "action_out_proj", other)
