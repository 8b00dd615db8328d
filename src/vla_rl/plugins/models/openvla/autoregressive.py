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
from vla_rl.plugins.models.openvla.base import FamilyPolicy, Parts, chunk_of, given
from vla_rl.plugins.models.openvla.heads import PolicyModule, public_network
from vla_rl.plugins.models.openvla.modeling import insert_columns
from vla_rl.toolkit.models.decoder import PreallocatedLayer
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.models.tokens import choose, entropy


class ARModule(PolicyModule):
    """Network with all parameters of an autoregressive policy. `full_vocabulary`: compute logits of all tokens instead
    of the action tokens."""

    full_vocabulary = False

    def decode(
        self,
        ids: Tensor,
        mask: Tensor | None,
        count: int,
        pick: Callable[[Tensor, int], Tensor],
        *,
        pixels: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Decode `count` tokens, without gradient. Leaves the Llama in training mode.

        Args:
            ids, mask: [B, L] without padding at the end.
            pick: (float32 logits [B, V], i) -> index int64 [B] of token i among the logits.
            pixels, features: see `OpenVLAForActionPrediction.forward`; one of them.
        Returns:
            indices int64 [B, count], and values [B] | [B, C] (None without a critic).
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
            values = self._values(hidden, prefix - 1, mask)
            if mask is not None:
                mask = F.pad(mask, (0, count), value=True)
            chosen: list[Tensor] = []
            for i in range(count):
                if i > 0:
                    seen = None if mask is None else mask[:, : prefix + i]
                    last = (chosen[-1] + self.first).unsqueeze(1)
                    hidden = self.vla(None, last, attention_mask=seen, causal=True, caches=caches, past=prefix + i - 1)
                chosen.append(pick(self.logits(hidden[:, -1]), i))
        finally:
            llama.train()
        return torch.stack(chosen, dim=1), values

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
        values = self._values(hidden, first, mask)
        return (None if tokens is None else self.logits(hidden[:, first:])), values

    def _values(self, hidden: Tensor, first: int, mask: Tensor | None) -> Tensor | None:
        if self.value_head is None:
            return None
        at = torch.full((len(hidden),), first, device=hidden.device)
        values: Tensor = self.value_head(hidden, at, mask)
        return values

    @property
    def first(self) -> int:
        """Token id of the first logit."""
        config = public_network(self.vla).config
        return 0 if self.full_vocabulary else config.action_vocab_end - config.n_action_bins

    def logits(self, hidden: Tensor) -> Tensor:
        network = public_network(self.vla)
        head = network.get_output_embeddings() if self.full_vocabulary else network.action_logits
        return head(hidden).float()


class ARPolicy(FamilyPolicy):
    """OpenVLA's policy; `builder.build_autoregressive` creates it."""

    module: ARModule
    name = "openvla"

    def __init__(self, parts: Parts, full_vocabulary: bool) -> None:
        super().__init__(parts)
        self.module.full_vocabulary = full_vocabulary

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        self._set_dropout(False)
        prompt = self.prompts.rows(obs.instructions)
        inputs = given(**self._see(obs), ids=prompt.ids, mask=prompt.mask)
        if not greedy:
            uniforms = as_tensor(noise.uniforms(self._chunk, self.tokens_per_action), self._device)
            inputs["uniforms"] = uniforms.flatten(1)
        return chunk_of(self.decide(inputs))

    def decide(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decode the tokens of a chunk: the likeliest, or by "uniforms" [B, count] among the inputs."""
        shape = (self._chunk, self.tokens_per_action)
        uniforms = inputs.get("uniforms")
        log_probs: list[Tensor] = []

        def pick(logits: Tensor, i: int) -> Tensor:
            scores = torch.log_softmax(logits / self._temperature, dim=-1)
            index = choose(scores, None if uniforms is None else uniforms[:, i])
            log_probs.append(scores.gather(-1, index.unsqueeze(-1)).squeeze(-1))
            return index

        pixels, features = inputs.get("pixels"), inputs.get("features")
        with self._numerics():
            index, values = self.module.decode(
                inputs["ids"], inputs.get("mask"), shape[0] * shape[1], pick, pixels=pixels, features=features
            )
        tokens = (index + self.module.first).unflatten(1, shape)
        return given(
            actions=self.codec.decode(tokens),
            log_probs=torch.stack(log_probs, dim=1).unflatten(1, shape),
            values=values,
            tokens=tokens,
            features=features,
        )

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        tokens = as_tensor(chunk.extras["tokens"], self._device)
        logits, values = self._score(obs, tokens, self._see(obs, chunk.extras))
        log_probs = torch.log_softmax(logits / self._temperature, dim=-1)
        chosen = log_probs.gather(-1, (tokens - self.module.first).unsqueeze(-1)).squeeze(-1)
        return Scores(log_probs=chosen, entropy=entropy(log_probs), values=values)

    @torch.no_grad()
    def values(self, obs: Observation) -> Tensor:
        self._require_critic()
        self._set_dropout(False)
        prompt = self.prompts.rows(obs.instructions)
        with self._numerics():
            result: Tensor = self.module(prompt.ids, prompt.mask, None, **self._see(obs))[1]
            return result

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the cross-entropy of the expert's tokens (temperature 1) under teacher forcing, averaged over batch
        and chunk."""
        tokens = self.encode_actions(actions)
        logits, _ = self._score(obs, tokens, self._see(obs), dropout=True)
        return F.cross_entropy(logits.flatten(0, 2), (tokens - self.module.first).flatten())

    def _score(
        self, obs: Observation, tokens: Tensor, seen: dict[str, Tensor | None], dropout: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return float32 logits [B, C, M, V] and values."""
        self._set_dropout(dropout)
        prompt = self.prompts.rows(obs.instructions)
        with self._numerics():
            logits, values = self.module(prompt.ids, prompt.mask, tokens.flatten(1), **seen)
        return logits.unflatten(1, tokens.shape[1:]), values
