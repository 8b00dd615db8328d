"""transformers' pi0 split into its two halves, so that the first runs once and the second at every denoising step.

The prefix (images and instruction) goes through the vision-language model, to whose keys and values the action expert
attends; the suffix is one state token and H action tokens. A token sees its own block and those before it: prefix,
state, actions. A missing camera is left out: pi0 masks it, and positions count only what is not masked.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from transformers import PI0Config, PI0ForConditionalGeneration
from transformers.initialization import no_init_weights

from vla_rl.toolkit.models.attention import WITH_BLIND_QUERIES, added_to_scores
from vla_rl.toolkit.models.decoder import LentLayer, RecordedLayer, Rotation, run_layers
from vla_rl.toolkit.models.flow_network import FlowModule, TimeEmbedding, mean_over
from vla_rl.toolkit.models.heads import HorizonValueHead, NoiseHead, PrefixValueHead


@frozen(eq=False)
class PiPrefix:
    """Precomputed inputs of the expert from images and instruction."""

    caches: list[LentLayer]
    """Keys and values of each layer."""
    mask: Tensor
    """Mask [B, 1, 1 + H, P + 1 + H] added to attention scores: 0 where a token of the suffix sees, else very low. pi0.5
    has no state token: H instead of 1 + H."""
    rotation: Rotation
    """Rotary embedding of the suffix's tokens."""
    summary: Tensor | None = None
    """float32 [B, D]: mean of the language model's output, for a critic that reads the prefix."""


def empty_network(config: PI0Config) -> PI0ForConditionalGeneration:
    """Return the network with uninitialised memory, for `networks.fill` or `networks.allocate`."""
    with no_init_weights():
        network = PI0ForConditionalGeneration(config)
    embed: Any = network.embed_action_time
    dit: Any = config.dit_config
    embed.sinusoid_embeds = TimeEmbedding(dit.hidden_size, config.min_period, config.max_period)
    network.model.dit.embed_tokens.requires_grad_(False)  # in the files, but never used
    network.model.vlm.language_model.config._attn_implementation = WITH_BLIND_QUERIES
    return network


class Pi0Module(FlowModule):
    """Network with all parameters of a policy."""

    state_tokens = 1

    def __init__(
        self,
        pi0: PI0ForConditionalGeneration,
        value_head: HorizonValueHead | PrefixValueHead | None = None,
        noise_head: NoiseHead | None = None,
    ) -> None:
        super().__init__((pi0.config.chunk_size, pi0.config.max_action_dim), value_head, noise_head)
        self.pi0 = pi0
        self._dtype = pi0.model.dit.layers[0].self_attn.q_proj.weight.dtype

    @property
    def network(self) -> PI0ForConditionalGeneration:
        return self.pi0

    def embed_prefix(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Return embeddings [B, P, D] of images [B, cameras, 3, S, S] in [-1, 1] and prompts int64 [B, L]."""
        vlm = self.pi0.model.vlm
        features = vlm.get_image_features(pixels.flatten(0, 1)).pooler_output
        text = vlm.get_input_embeddings()(ids)
        return torch.cat([features.reshape(len(ids), -1, text.shape[2]).to(text.dtype), text], dim=1)

    def see(self, pixels: Tensor, ids: Tensor, mask: Tensor, shown: Tensor | None = None) -> PiPrefix:
        """Run the vision-language model on `embed_prefix`'s inputs.

        Args:
            mask: bool [B, L], False at padding.   shown: bool [B, cameras], False where masked; None: all visible.
        """
        embeds = self.embed_prefix(pixels, ids)
        (rows, length), prompt = embeds.shape[:2], ids.shape[1]
        shown = mask.new_ones(rows, pixels.shape[1]) if shown is None else shown
        valid = torch.cat([shown.repeat_interleave((length - prompt) // pixels.shape[1], dim=1), mask], dim=1)
        language, expert = self.pi0.model.vlm.language_model, self.pi0.model.dit
        recorded = [RecordedLayer() for _ in language.layers]
        hidden = run_layers(
            language,
            embeds,
            self._scores(self._sees(valid)).expand(-1, 1, length, -1),
            language.rotary_emb(embeds, position_ids=valid.cumsum(1) - 1),
            recorded,
            blind_queries=self.blind_queries,
        )
        tokens = self.state_tokens + self.pi0.config.chunk_size
        among = mask.new_ones(tokens, tokens)
        among[: self.state_tokens, self.state_tokens :] = False  # the state does not see the actions
        positions = valid.sum(1, keepdim=True) + torch.arange(tokens, device=mask.device)
        reads = isinstance(self.value_head, PrefixValueHead)
        return PiPrefix(
            [LentLayer(layer) for layer in recorded],
            self._scores(
                torch.cat([valid[:, None].expand(-1, tokens, -1), among.expand(rows, -1, -1)], dim=2)[:, None]
            ),
            expert.rotary_emb(mask.new_empty(0, dtype=self._dtype), position_ids=positions),
            mean_over(hidden, self._counted(valid, prompt)) if reads else None,
        )

    @property
    def blind_queries(self) -> bool:
        """Whether tokens of the prefix may see nothing, not even themselves."""
        return False

    def _sees(self, valid: Tensor) -> Tensor:
        """Return the mask [B, 1, P or 1, P] of prefix tokens that each prefix token attends to, from bool [B, P]."""
        return valid[:, None, None, :]

    def _counted(self, valid: Tensor, prompt: int) -> Tensor:
        """Return which tokens the critic's mean includes; the last `prompt` of them are the instruction."""
        return valid

    def _scores(self, seen: Tensor) -> Tensor:
        return added_to_scores(seen, self._dtype)

    def denoise(self, prefix: PiPrefix, state: Tensor, x: Tensor, time: Tensor) -> Tensor:
        embeds = self.pi0.embed_action_time(state, x, time).to(self._dtype)
        hidden = run_layers(self.pi0.model.dit, embeds, prefix.mask, prefix.rotation, prefix.caches)
        result: Tensor = hidden[:, 1:].float()
        return result

    def velocity(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.pi0.action_out_proj(hidden)
        return result


def stays_float32(name: str) -> bool:
    """Return whether a parameter stays in float32: RMS norms of the towers, and the projections of state, time and
    actions, as in openpi."""
    return not name.startswith("model.") or ("norm" in name and ".vision_tower." not in name)
