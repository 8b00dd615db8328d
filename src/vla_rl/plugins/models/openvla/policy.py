"""OpenVLA-OFT with the discrete head: a chunk in one forward pass, its tokens sampled with a temperature.

Log-probabilities are those of the 256 action tokens at that temperature (SimpleVLA-RL, section 3); tokens of a chunk
are independent given the observation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.core.randomness import Noise
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, Scores
from vla_rl.plugins.models.openvla.base import FamilyPolicy, replay
from vla_rl.plugins.models.openvla.heads import OFTModule
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.models.tokens import choose, entropy


class OFTPolicy(FamilyPolicy):
    """OpenVLA-OFT's policy with the discrete head; `builder.build_policy` creates it."""

    module: OFTModule
    name = "openvla_oft"

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        seen = self._see(obs)
        logits, values = self._act(obs, seen)
        log_probs = torch.log_softmax(logits / self._temperature, dim=-1)
        uniforms = None if greedy else as_tensor(noise.uniforms(self._chunk, self.tokens_per_action), self._device)
        index = choose(log_probs, uniforms)
        chosen = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        tokens = index + self.codec.first
        return Chunk(
            actions=self.codec.decode(tokens), log_probs=chosen, values=values, extras=replay(seen, tokens=tokens)
        )

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        logits, values = self._act(obs, self._see(obs, chunk.extras))
        log_probs = torch.log_softmax(logits / self._temperature, dim=-1)
        index = as_tensor(chunk.extras["tokens"], self._device) - self.codec.first
        chosen = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return Scores(log_probs=chosen, entropy=entropy(log_probs), values=values)

    @torch.no_grad()
    def values(self, obs: Observation) -> Tensor:
        self._require_critic()
        result: Tensor = self._forward(obs, 0)[1]
        return result

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the cross-entropy over the action tokens (temperature 1), averaged over batch and chunk."""
        logits, _ = self._act(obs, dropout=True)
        target = self.encode_actions(actions) - self.codec.first
        return F.cross_entropy(logits.flatten(0, 2), target.flatten())

    def _act(
        self, obs: Observation, seen: dict[str, Tensor | None] | None = None, dropout: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return float32 logits [B, C, M, bins] and values."""
        logits, values = self._forward(obs, self._chunk * self.tokens_per_action, seen, dropout)
        return logits.unflatten(1, (self._chunk, self.tokens_per_action)), values

    def _forward(
        self, obs: Observation, reads: int, seen: dict[str, Tensor | None] | None = None, dropout: bool = False
    ) -> Any:
        self._set_dropout(dropout)
        seen = self._see(obs) if seen is None else seen
        prompt = self.prompts.rows(obs.instructions)
        with self._numerics():
            return self.module(
                seen["pixels"],
                self._state(obs),
                prompt.ids,
                prompt.mask,
                prompt.placeholder,
                prompt.start,
                reads,
                seen["features"],
                self._steps(obs),
            )
