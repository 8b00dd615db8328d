"""OpenVLA-OFT with the discrete head: a chunk in one forward pass, its tokens sampled with a temperature.

Log-probabilities are those of the 256 action tokens at that temperature (SimpleVLA-RL, section 3); tokens of a chunk
are independent given the observation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vla_rl.core.types import Observation
from vla_rl.plugins.models.openvla.base import ParallelPolicy, TokenPolicy, drop_missing


class OFTPolicy(ParallelPolicy, TokenPolicy):
    """OpenVLA-OFT's policy with the discrete head; `builder.build_policy` creates it."""

    def decide(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Choose the tokens of a chunk: the likeliest, or by "uniforms" among the inputs."""
        logits, values = self._run_module(inputs, self._chunk * self.tokens_per_action)
        actions, log_probs, tokens = self._choose_tokens(logits, inputs.get("uniforms"))
        return drop_missing(
            actions=actions, log_probs=log_probs, values=values, tokens=tokens, features=inputs.get("features")
        )

    def _choose_tokens(self, logits: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions [B, C, A], log-probs and token ids [B, C, M], for logits [B, C * M, bins]."""
        tokens, log_probs = self._pick_bins(self._in_chunks(logits), uniforms)
        return self.codec.decode_tokens(tokens), log_probs, tokens

    def _in_chunks(self, logits: Tensor) -> Tensor:
        """Return logits [B, C * M, bins] as [B, C, M, bins]."""
        in_chunks: Tensor = logits.unflatten(1, (self._chunk, self.tokens_per_action))
        return in_chunks

    def _compute_logits(
        self, obs: Observation, tokens: Tensor, seen: dict[str, Tensor | None] | None = None, dropout: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        logits, values = self._run_network(obs, self._chunk * self.tokens_per_action, seen, dropout)
        return self._in_chunks(logits), values

    @torch.no_grad()
    def values(self, obs: Observation) -> Tensor:
        result: Tensor = self._run_network(obs, 0)[1]
        return result

    regions = (*TokenPolicy.regions, _choose_tokens)
