"""OpenVLA-OFT with its two heads, which predict a chunk in one forward pass.

Discrete head: its tokens are sampled with a temperature. Log-probabilities are those of the 256 action tokens at that
temperature (SimpleVLA-RL, section 3); tokens of a chunk are independent given the observation.

L1 head: actions directly from the hidden states, for evaluation and behaviour cloning. Without a deviation it gives
one action and no distribution: there is nothing to sample, and no log-probability for RL. With a deviation, actions
are sampled around the head's, which are their mode, and scored before they are clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from vla_rl.core.capabilities import HasCritic
from vla_rl.core.errors import UserError
from vla_rl.core.randomness import Noise
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, Scores
from vla_rl.plugins.models.openvla.base import ParallelPolicy, Parts, TokenPolicy, build_extras, drop_missing
from vla_rl.plugins.models.openvla.heads import Deviation
from vla_rl.toolkit.models.networks import as_tensor


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


class L1Policy(ParallelPolicy):
    """OpenVLA-OFT's deterministic policy with the L1 head, by `builder.build_policy`. `log_probs` of chunks are 0."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.tokens_per_action = 1

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        if not greedy:
            self._refuse_request("cannot be sampled")
        actions = self.codec.restore_actions(self._predict_actions(obs, self._prepare_images(obs))[0].double())
        return Chunk(actions=actions, log_probs=torch.zeros_like(actions[..., :1]))

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        self._refuse_request("has no log-probabilities")

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the mean absolute error in normalised units, the loss of OpenVLA-OFT's fine-tuning."""
        return self._imitation_errors(obs, actions).mean()

    def imitation_terms(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        return self._imitation_errors(obs, actions).mean(2)

    def _imitation_errors(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        target = self.codec.normalise_actions(torch.as_tensor(actions, device=self._device))
        predicted, _ = self._predict_actions(obs, self._prepare_images(obs), dropout=True)
        return (predicted - target.float()).abs()

    def _predict_actions(
        self, obs: Observation, seen: dict[str, Tensor | None], dropout: bool = False
    ) -> tuple[Tensor, Any]:
        """Return float32 [B, C, A] as the statistics scale them, and values."""
        got, values = self._run_network(obs, self._chunk * self.codec.action_dim, seen, dropout)
        assert got is not None
        return got, values

    def _refuse_request(self, what: str) -> NoReturn:
        raise UserError(
            f"openvla_oft with `head: l1` {what}: the L1 head gives one action, not a distribution. It serves "
            "evaluation and imitation; reinforcement learning needs `deviation: {}` with it, or `head: discrete` and "
            "a checkpoint trained so"
        )


class SampledL1Policy(L1Policy, HasCritic):
    """OpenVLA-OFT's stochastic policy with the L1 head and a deviation; `builder.build_policy` creates it. An action
    has one log-probability: the sum over its dimensions."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        assert self.module.deviation is not None
        self.critic = self.module.value_head
        low, high = (torch.tensor(side, dtype=torch.float32, device=self._device) for side in parts.bounds)
        self._low = low
        self._high = high

    @property
    def _action_deviation(self) -> Deviation:
        assert self.module.deviation is not None
        return self.module.deviation

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        seen = self._prepare_images(obs)
        mean, values = self._predict_actions(obs, seen)
        sampled = mean if greedy else mean + self._action_deviation.draw_offset(noise)
        actions = self.codec.restore_actions(sampled.double()).clamp(self._low, self._high)
        return Chunk(
            actions=actions,
            log_probs=self._log_probs(sampled, mean),
            values=values,
            extras=build_extras(seen, sampled=sampled),
        )

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        mean, values = self._predict_actions(obs, self._prepare_images(obs, chunk.extras))
        log_probs = self._log_probs(as_tensor(chunk.extras["sampled"], self._device), mean)
        entropy = self._action_deviation.compute_entropy().sum(-1, keepdim=True).expand_as(log_probs)
        return Scores(log_probs=log_probs, entropy=entropy, values=values)

    @torch.no_grad()
    def values(self, obs: Observation) -> Tensor:
        result: Tensor = self._run_network(obs, 0)[1]
        return result

    def _log_probs(self, sampled: Tensor, mean: Tensor) -> Tensor:
        """Return log-probs [B, C, 1]."""
        return self._action_deviation.log_density(sampled - mean).sum(-1, keepdim=True)
