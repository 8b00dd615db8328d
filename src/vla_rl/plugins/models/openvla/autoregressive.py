"""Plain OpenVLA: decodes action tokens one after another, each conditioned on those before it (Kim et al. 2024, arXiv
2406.09246).

A sequence is `BOS, patches, padding, prompt, action tokens`: prompts of unequal length end in the same column, so one
batch decodes with one KV cache. Scoring repeats the sequences with their tokens filled in, in one causal pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.core.randomness import Noise
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, Scores
from vla_rl.plugins.models.openvla.base import Parts, TokenPolicy, chunk_of, drop_missing
from vla_rl.plugins.models.openvla.heads import PolicyModule, public_network
from vla_rl.plugins.models.openvla.modeling import insert_columns
from vla_rl.toolkit.models.decoder import PreallocatedLayer
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.models.tokens import categorical_entropy, choose_bins


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
        """Return float32 logits [B, N, V] of `tokens` int64 [B, N] under teacher forcing (None without tokens), and
        values."""
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

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        self._set_dropout(False)
        prompt = self.prompts.take_prompts(obs.instructions)
        inputs = drop_missing(**self._prepare_images(obs), ids=prompt.ids, mask=prompt.mask)
        if not greedy:
            uniforms = as_tensor(noise.uniforms(self._chunk, self.tokens_per_action), self._device)
            inputs["uniforms"] = uniforms.flatten(1)
        return chunk_of(self.decide(inputs))

    def decide(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decode the tokens of a chunk: the likeliest, or by "uniforms" [B, count] among the inputs."""
        shape = (self._chunk, self.tokens_per_action)
        uniforms = inputs.get("uniforms")

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
        scores = torch.log_softmax(self.module.compute_logits(hidden) / self._temperature, dim=-1)
        index = choose_bins(scores, uniforms)
        return index + self.module.first_token, scores.gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def _decode_actions(self, tokens: Tensor) -> Tensor:
        return self.codec.decode_tokens(tokens)

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        tokens = as_tensor(chunk.extras["tokens"], self._device)
        logits, values = self._run_network(obs, tokens, self._prepare_images(obs, chunk.extras))
        log_probs, entropies = self._score_tokens(logits, tokens)
        return Scores(log_probs=log_probs, entropy=entropies, values=values)

    def _score_tokens(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies [B, C, M] of token ids [B, C, M], for logits [B, C, M, V]."""
        log_probs = torch.log_softmax(logits / self._temperature, dim=-1)
        index = tokens - self.module.first_token
        return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1), categorical_entropy(log_probs)

    @torch.no_grad()
    def values(self, obs: Observation) -> Tensor:
        self._set_dropout(False)
        prompt = self.prompts.take_prompts(obs.instructions)
        with self._autocast_context():
            result: Tensor = self.module(prompt.ids, prompt.mask, None, **self._prepare_images(obs))[1]
            return result

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the cross-entropy of the expert's tokens (temperature 1) under teacher forcing, averaged over batch
        and chunk."""
        return self._cross_entropy(obs, actions, "mean")

    def imitation_terms(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        terms: Tensor = self._cross_entropy(obs, actions, "none")
        return terms.view(-1, self._chunk, self.tokens_per_action).mean(2)

    def _cross_entropy(self, obs: Observation, actions: ArrayOrTensor, reduction: str) -> Tensor:
        tokens = self.encode_actions(actions)
        logits, _ = self._run_network(obs, tokens, self._prepare_images(obs), dropout=True)
        return F.cross_entropy(logits.flatten(0, 2), (tokens - self.module.first_token).flatten(), reduction=reduction)

    def _run_network(
        self, obs: Observation, tokens: Tensor, seen: dict[str, Tensor | None], dropout: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return float32 logits [B, C, M, V] and values."""
        self._set_dropout(dropout)
        prompt = self.prompts.take_prompts(obs.instructions)
        with self._autocast_context():
            logits, values = self.module(prompt.ids, prompt.mask, tokens.flatten(1), **seen)
        return logits.unflatten(1, tokens.shape[1:]), values

    regions = (*TokenPolicy.regions, _choose_tokens, _decode_actions, _score_tokens)
