"""Policy of film_resnet with a Gaussian head: each number of a chunk has its own normal distribution, squashed by tanh
into the range of the actions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vla_rl.core.capabilities import Reparameterised
from vla_rl.core.randomness import Noise
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, Scores
from vla_rl.plugins.models.film_resnet.network import FilmResnet
from vla_rl.plugins.models.film_resnet.policy import FilmPolicy
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.models.scaling import FeatureScaler
from vla_rl.toolkit.models.squashed_gaussian import SquashedGaussian

CLONED_RANGE = 0.99
"""Part of the actions' range to whose ends demonstrated actions are clipped, since tanh reaches the ends nowhere."""


class GaussianFilmResnetPolicy(FilmPolicy, Reparameterised):
    """film_resnet's policy with squashed Gaussians; `builder.build_policy` creates it."""

    def __init__(self, **shared: Any) -> None:
        """Create the policy; `shared` are the arguments of `FilmPolicy`."""
        super().__init__(**shared)
        self._scaler = FeatureScaler(self.statistics.action, self._device)

    @torch.no_grad()
    def sample_chunk(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        distribution, values = self._predict_distribution(self.module, obs)
        normals = None if greedy else as_tensor(noise.normals(*distribution.mean.shape[1:]), self._device)
        unsquashed = distribution.sample(normals)
        return Chunk(
            actions=self._scaler.restore_units(torch.tanh(unsquashed)),
            log_probs=distribution.log_prob(unsquashed),
            values=values,
            extras={"unsquashed": unsquashed},
        )

    def chunk_log_probs(self, obs: Observation, chunk: Chunk) -> Scores:
        distribution, values = self._predict_distribution(self.module, obs)
        unsquashed = as_tensor(chunk.extras["unsquashed"], self._device)
        return Scores(log_probs=distribution.log_prob(unsquashed), entropy=distribution.entropy(), values=values)

    @torch.no_grad()
    def reference_log_probs(self, obs: Observation, chunk: Chunk) -> Tensor:
        """Return log-probs under the initial weights, of which the policy keeps a copy."""
        unsquashed = as_tensor(chunk.extras["unsquashed"], self._device)
        return self._predict_distribution(self._reference, obs)[0].log_prob(unsquashed)

    def imitation_loss(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the negative log-likelihood of actions (temperature 1), averaged over batch and chunk. Images are
        shifted at random, keyed by the batch's demonstrated actions."""
        return self.imitation_losses(obs, actions).mean()

    def imitation_terms(self, obs: Observation, actions: ArrayOrTensor) -> Tensor:
        """Return the terms of `imitation_loss`, averaged over the numbers of each action."""
        outputs, _ = self.module(*self._prepare_inputs(obs, self._draw_offsets(actions)))
        scaled = self._scaler.normalise_feature(as_tensor(actions, self._device), self._scaler.dim)
        unsquashed = torch.atanh(scaled.clamp(-CLONED_RANGE, CLONED_RANGE))
        return -SquashedGaussian.of_outputs(outputs).log_prob(unsquashed).mean(2)

    def reparameterised_actions(self, features: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.module.decode_features(features.to(self._dtype))
        distribution = SquashedGaussian.of_outputs(outputs, self._temperature)
        unsquashed = distribution.sample(normals)
        return self._scaler.restore_units(torch.tanh(unsquashed)), distribution.log_prob(unsquashed)

    def _predict_distribution(self, module: FilmResnet, obs: Observation) -> tuple[SquashedGaussian, Tensor | None]:
        """Return the distributions [B, C, A] at the policy's temperature, and values."""
        outputs, values = module(*self._prepare_inputs(obs))
        return SquashedGaussian.of_outputs(outputs, self._temperature), values
