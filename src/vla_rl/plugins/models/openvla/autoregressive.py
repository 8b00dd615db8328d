"""Plain OpenVLA: decodes action tokens one after another, each conditioned on those before it (Kim et al. 2024, arXiv
2406.09246).

A sequence is `BOS, patches, padding, prompt, action tokens`: prompts of unequal length end in the same column, so one
batch decodes with one KV cache. Scoring repeats the sequences with their tokens filled in, in one causal pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.core.types import Observation
from vla_rl.plugins.models.openvla.base import Parts, TokenPolicy, drop_missing
from vla_rl.plugins.models.openvla.heads import PolicyModule, public_network
from vla_rl.plugins.models.openvla.modeling import insert_columns
from vla_rl.toolkit.models.decoder import PreallocatedLayer


class ARModule(PolicyModule):
    """Network with all parameters of an autoregressive policy. `full_vocabulary`: compute logits of all tokens instead
    of the action tokens."""

    full_vocabulary = False

    def decode_tokens(
        self,
        ids: Tensor,
        mask: Tensor | None,
        count: int,
        pick: Callable[[Tensor, int], tuple[Tensor, Tensor]],
        *,
        pixels: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Decode `count` tokens, without gradient. Leaves the Llama in training mode.

        Args:
            ids, mask: [B, L] without padding at the end.
            pick: (hidden states [B, D], i) -> id int64 [B] of token i, and its log-prob.
            pixels, features: see `OpenVLAForActionPrediction.forward`; one of them.
        Returns:
            token ids int64 [B, count], log-probs [B, count], and values [B] | [B, C] (None without a critic).
        """
        network = public_network(self.vla)
        llama = network.language_model
        caches = [PreallocatedLayer(count - 1) for _ in llama.model.layers]
        llama.eval()  # a Llama that trains with gradient checkpointing drops the cache
        try:
            hidden = self.vla(pixels, ids, attention_mask=mask, causal=True, caches=caches, features=features)
            if mask is not None:
                mask = insert_columns(mask, hidden.shape[1] - ids.shape[1])
            prefix = hidden.shape[1]
            values = self._compute_values(hidden, prefix - 1, mask)
            if mask is not None:
                mask = F.pad(mask, (0, count), value=True)
            picked: list[tuple[Tensor, Tensor]] = []
            for i in range(count):
                if i > 0:
                    seen = None if mask is None else mask[:, : prefix + i]
                    last = picked[-1][0].unsqueeze(1)
                    hidden = self.vla(None, last, attention_mask=seen, causal=True, caches=caches, past=prefix + i - 1)
                picked.append(pick(hidden[:, -1], i))
        finally:
            llama.train()
        tokens, log_probs = (torch.stack(part, dim=1) for part in zip(*picked, strict=True))
        return tokens, log_probs, values

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None,
        tokens: Tensor | None,
        *,
        pixels: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return float32 logits [B, N, V] of `tokens` int64 [B, N] under teacher forcing (None without), and values."""
        count = 1 if tokens is None else tokens.shape[1]
        if tokens is not None and count > 1:
            ids = torch.cat([ids, tokens[:, :-1]], dim=1)
            mask = None if mask is None else F.pad(mask, (0, count - 1), value=True)
        hidden = self.vla(pixels, ids, attention_mask=mask, causal=True, features=features)
        if mask is not None:
            mask = insert_columns(mask, hidden.shape[1] - ids.shape[1])
        first = hidden.shape[1] - count
        values = self._compute_values(hidden, first, mask)
        return (None if tokens is None else self.compute_logits(hidden[:, first:])), values

    def _compute_values(self, hidden: Tensor, first: int, mask: Tensor | None) -> Tensor | None:
        if self.value_head is None:
            return None
        at = torch.full((len(hidden),), first, device=hidden.device)
        values: Tensor = self.value_head(hidden, at, mask)
        return values

    @property
    def first_token(self) -> int:
        """Token id of the first logit."""
        config = public_network(self.vla).config
        return 0 if self.full_vocabulary else config.action_vocab_end - config.n_action_bins

    def compute_logits(self, hidden: Tensor) -> Tensor:
        network = public_network(self.vla)
        head = network.get_output_embeddings() if self.full_vocabulary else network.action_logits
        return head(hidden).float()


class ARPolicy(TokenPolicy):
    """OpenVLA's policy; `builder.build_autoregressive` creates it."""

    module: ARModule
    name = "openvla"

    def __init__(self, parts: Parts, full_vocabulary: bool) -> None:
        super().__init__(parts)
        self.module.full_vocabulary = full_vocabulary
        self.first_token = self.module.first_token

    def _prepare_inputs(self, obs: Observation, seen: dict[str, Tensor | None]) -> dict[str, Tensor]:
        prompt = self.prompts.take_prompts(obs.instructions)
        return drop_missing(**seen, ids=prompt.ids, mask=prompt.mask)

    def decide(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decode the tokens of a chunk: the likeliest, or by "uniforms" [B, C, M] among the inputs."""
        shape = (self._chunk, self.tokens_per_action)
        uniforms = inputs["uniforms"].flatten(1) if "uniforms" in inputs else None

        def pick_token(hidden: Tensor, i: int) -> tuple[Tensor, Tensor]:
            return self._choose_tokens(hidden, None if uniforms is None else uniforms[:, i])

        pixels, features = inputs.get("pixels"), inputs.get("features")
        with self._autocast_context():
            tokens, log_probs, values = self.module.decode_tokens(
                inputs["ids"], inputs.get("mask"), shape[0] * shape[1], pick_token, pixels=pixels, features=features
            )
        tokens = tokens.unflatten(1, shape)
        return drop_missing(
            actions=self._decode_actions(tokens),
            log_probs=log_probs.unflatten(1, shape),
            values=values,
            tokens=tokens,
            features=features,
        )

    def _choose_tokens(self, hidden: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return token ids [B] and their log-probs, for hidden states [B, D]."""
        return self._pick_bins(self.module.compute_logits(hidden), uniforms)

    def _decode_actions(self, tokens: Tensor) -> Tensor:
        return self.codec.decode_tokens(tokens)

    def _compute_logits(
        self, obs: Observation, tokens: Tensor, seen: dict[str, Tensor | None] | None = None, dropout: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits under teacher forcing."""
        logits, values = self._run_network(obs, tokens.flatten(1), seen, dropout)
        return logits.unflatten(1, tokens.shape[1:]), values

    @torch.no_grad()
    def values(self, obs: Observation) -> Tensor:
        result: Tensor = self._run_network(obs, None)[1]
        return result

    def _run_network(
        self,
        obs: Observation,
        tokens: Tensor | None,
        seen: dict[str, Tensor | None] | None = None,
        dropout: bool = False,
    ) -> Any:
        """Return float32 logits [B, N, V] of tokens [B, N], and values."""
        self._set_dropout(dropout)
        prompt = self.prompts.take_prompts(obs.instructions)
        images = self._prepare_images(obs) if seen is None else seen
        with self._autocast_context():
            return self.module(prompt.ids, prompt.mask, tokens, **images)

    regions = (*TokenPolicy.regions, _choose_tokens, _decode_actions)
