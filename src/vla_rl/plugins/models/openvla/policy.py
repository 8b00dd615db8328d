"""OpenVLA-OFT with the discrete head: a chunk in one forward pass, its tokens sampled with a temperature.

Log-probabilities are those of the 256 action tokens at that temperature (SimpleVLA-RL, section 3); tokens of a chunk
are independent given the observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.core.randomness import Noise
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, Scores
from vla_rl.plugins.models.openvla.base import TokenPolicy, chunk_of, drop_missing
from vla_rl.plugins.models.openvla.heads import OFTModule
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.models.tokens import categorical_entropy, choose_bins


class OFTPolicy(TokenPolicy):
    """OpenVLA-OFT's policy with the discrete head; `builder.build_policy` creates it."""

    module: OFTModule
    name = "openvla_oft"

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        self._set_dropout(False)
        inputs = self._prepare_inputs(obs, self._prepare_images(obs))
        if not greedy:
            inputs["uniforms"] = as_tensor(noise.uniforms(self._chunk, self.tokens_per_action), self._device)
        return chunk_of(self.decide(inputs))

    def decide(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Choose the tokens of a chunk: the likeliest, or by "uniforms" among the inputs."""
        logits, values = self._run_module(inputs, self._chunk * self.tokens_per_action)
        actions, log_probs, tokens = self._choose_tokens(logits, inputs.get("uniforms"))
        return drop_missing(
            actions=actions, log_probs=log_probs, values=values, tokens=tokens, features=inputs.get("features")
        )

    def _choose_tokens(self, logits: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions [B, C, A], log-probs and token ids [B, C, M], for logits [B, C * M, bins]."""
        log_probs = torch.log_softmax(self._in_chunks(logits) / self._temperature, dim=-1)
        index = choose_bins(log_probs, uniforms)
        tokens = index + self.codec.first
        return self.codec.decode_tokens(tokens), log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1), tokens

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        tokens = as_tensor(chunk.extras["tokens"], self._device)
        logits, values = self._run_network(
            obs, self._chunk * self.tokens_per_action, self._prepare_images(obs, chunk.extras)
        )
        log_probs, entropies = self._score_tokens(logits, tokens)
        return Scores(log_probs=log_probs, entropy=entropies, values=values)

    def _score_tokens(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies [B, C, M] of token ids [B, C, M], for logits [B, C * M, bins]."""
        log_probs = torch.log_softmax(self._in_chunks(logits) / self._temperature, dim=-1)
        index = tokens - self.codec.first
        return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1), categorical_entropy(log_probs)

    def _in_chunks(self, logits: Tensor) -> Tensor:
        """Return logits [B, C * M, bins] as [B, C, M, bins]."""
        in_chunks: Tensor = logits.unflatten(1, (self._chunk, self.tokens_per_action))
        return in_chunks

    @torch.no_grad()
    def values(self, obs: Observation) -> Tensor:
        result: Tensor = self._run_network(obs, 0)[1]
        return result

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the cross-entropy over the action tokens (temperature 1), averaged over batch and chunk."""
        return self._cross_entropy(obs, actions, "mean")

    def imitation_terms(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        terms: Tensor = self._cross_entropy(obs, actions, "none")
        return terms.view(-1, self._chunk, self.tokens_per_action).mean(2)

    def _cross_entropy(self, obs: Observation, actions: ArrayOrTensor, reduction: str) -> Tensor:
        logits, _ = self._run_network(obs, self._chunk * self.tokens_per_action, dropout=True)
        target = self.encode_actions(actions) - self.codec.first
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)

    def _run_network(
        self, obs: Observation, reads: int, seen: dict[str, Tensor | None] | None = None, dropout: bool = False
    ) -> Any:
        self._set_dropout(dropout)
        return self._run_module(self._prepare_inputs(obs, self._prepare_images(obs) if seen is None else seen), reads)

    def _prepare_inputs(self, obs: Observation, seen: dict[str, Tensor | None]) -> dict[str, Tensor]:
        prompt = self.prompts.take_prompts(obs.instructions)
        return drop_missing(
            **seen,
            state=self._normalise_state(obs),
            ids=prompt.ids,
            mask=prompt.mask,
            placeholder=prompt.placeholder,
            start=prompt.start,
            steps=self._read_steps(obs),
        )

    def _run_module(self, inputs: Mapping[str, Tensor], reads: int) -> Any:
        with self._autocast_context():
            return self.module(
                inputs.get("pixels"),
                inputs.get("state"),
                inputs["ids"],
                inputs.get("mask"),
                inputs["placeholder"],
                inputs["start"],
                reads,
                inputs.get("features"),
                inputs.get("steps"),
            )

    regions = (*TokenPolicy.regions, _choose_tokens, _score_tokens)
