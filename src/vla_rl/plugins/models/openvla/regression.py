"""OpenVLA-OFT with the L1 head: actions straight from the hidden states, for evaluation and imitation.

It gives one action and no distribution, so there is nothing to sample from and no log-probability to train by RL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.core.errors import NotOffered
from vla_rl.core.randomness import Noise
from vla_rl.core.types import Chunk, Observation, Scores
from vla_rl.plugins.models.openvla.base import FamilyPolicy, Parts
from vla_rl.plugins.models.openvla.heads import OFTModule

if TYPE_CHECKING:
    from vla_rl.core.types import Array


class L1Policy(FamilyPolicy):
    """Made by `builder.build_policy`. `log_probs` of its chunks are 0: what it does, it does with certainty."""

    module: OFTModule
    name = "openvla_oft"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.tokens_per_action = 1

    def encode_actions(self, actions: Array) -> Tensor:
        raise NotOffered("openvla_oft with `head: l1` has no action tokens")

    def decode_actions(self, tokens: Array) -> Tensor:
        raise NotOffered("openvla_oft with `head: l1` has no action tokens")

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        if not greedy:
            self._refuse("cannot be sampled")
        actions = self.codec.restore(self._predict(obs).double())
        return Chunk(actions=actions, log_probs=torch.zeros_like(actions[..., :1]))

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        self._refuse("has no log-probabilities")

    def imitation_loss(self, obs: Observation, actions: Array) -> Tensor:
        """Mean absolute error in normalised units, as OpenVLA-OFT is fine-tuned."""
        target = self.codec.normalise(torch.as_tensor(actions, device=self._device))
        return F.l1_loss(self._predict(obs, dropout=True), target.float())

    def _predict(self, obs: Observation, dropout: bool = False) -> Tensor:
        """float32 [B, C, A] as the statistics scale them."""
        self._set_dropout(dropout)
        prompt, seen = self.prompts.rows(obs.instructions), self._see(obs)
        reads = self._chunk * self.codec.action_dim
        ids, mask, blank, start = prompt.ids, prompt.mask, prompt.blank, prompt.start
        with self._numerics():
            got, _ = self.module(seen["pixels"], self._state(obs), ids, mask, blank, start, reads, seen["features"])
        assert got is not None
        return got

    def _refuse(self, what: str) -> NoReturn:
        raise NotOffered(
            f"openvla_oft with `head: l1` {what}: the L1 head gives one action, not a distribution. It serves "
            "evaluation and imitation; reinforcement learning needs `head: discrete` and a checkpoint trained so"
        )
