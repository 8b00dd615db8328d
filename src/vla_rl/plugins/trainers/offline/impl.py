"""Advantage-weighted cloning of recorded episodes.

Both algorithms clone recorded actions with weights exp(A / temperature). They differ in the critic:

AWR (Peng et al. 2019, arXiv:1910.00177, algorithm 1): V(s) regresses on recorded discounted returns R; A = R - V(s).
IQL (Kostrikov et al. 2021, arXiv:2110.06169): V(s) is an expectile of min Q'(s, a) over two target networks (eq. 5);
Q(s, a) regresses on r + discount^C V(s') (eq. 6); A = min Q'(s, a) - V(s) (eq. 7).

A state s' is what follows a chunk of C actions. An episode's end counts as its end whatever ended it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vla_rl.core.randomness import derived_seed
from vla_rl.core.trainers import ImitationStep
from vla_rl.plugins.trainers.offline.config import IQL, OfflineConfig
from vla_rl.toolkit.algorithms.statistics import MetricAccumulator
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.critics import (
    Critic,
    CriticEnsemble,
    CriticInputs,
    advantage_weights,
    check_features,
    expectile_loss,
    feature_size,
    update_target,
)
from vla_rl.toolkit.trainers.imitation import make_policy_step
from vla_rl.toolkit.trainers.recorded_returns import RecordedReturns
from vla_rl.toolkit.trainers.recording_trainer import RecordingBatch, RecordingTrainer

CRITICS = 2
"""Q-networks, of which the lower value counts (clipped double Q-learning, Fujimoto et al. 2018)."""


class Offline(RecordingTrainer):
    """Trainer of the policy and of critics on its features, from recordings."""

    name = "offline"
    optimizer_name = "critics"
    unsharded = "has critics that are not sharded"

    def __init__(self, config: OfflineConfig, context: TrainerContext) -> None:
        """Create the critics. Raises UserError for a model without features."""
        trained = context.trained
        check_features(trained, self.name)
        self._config = config
        features = feature_size(trained)
        actions = context.chunk * trained.info.action_dim
        sizes: dict[str, Any] = {"hidden": config.hidden, "layer_norm": config.layer_norm}
        seed = derived_seed(context.seed, "offline/critics")
        self._value = Critic(features, seed=seed, **sizes).to(trained.device)
        self._q: CriticEnsemble | None = None
        self._target_q: CriticEnsemble | None = None
        critics: dict[str, nn.Module] = {"value": self._value}
        if isinstance(config.algorithm, IQL):
            self._q = CriticEnsemble(CRITICS, features + actions, seed=seed + 1, **sizes).to(trained.device)
            self._target_q = copy.deepcopy(self._q).requires_grad_(False)
            critics["q"] = self._q
        super().__init__(config, context, critics, guarded="critics")
        self._critic_inputs = CriticInputs(trained.info.action_low, trained.info.action_high, self._device)

    def targets(self) -> Mapping[str, nn.Module]:
        return {} if self._target_q is None else {"q": self._target_q}

    def make_steps(self, recorded: RecordedReturns, steps: Sequence[ImitationStep], metrics: MetricAccumulator) -> None:
        samples = self.read_steps(recorded, steps, bootstraps=self._q is not None)

        def compute_loss(batch: RecordingBatch) -> torch.Tensor:
            loss, sums = self._compute_loss(batch, recorded)
            metrics.add_sums(sums)
            return loss

        algorithm = self._config.algorithm
        for step in steps:
            self._optimizer.zero_grad(set_to_none=True)
            self.step_networks(make_policy_step(self._trained, step, samples, compute_loss, self._heartbeat))
            if self._q is not None and self._target_q is not None and isinstance(algorithm, IQL):
                update_target(self._target_q, self._q, algorithm.target_rate)
            self._updates += 1

    def _compute_loss(
        self, samples: RecordingBatch, recorded: RecordedReturns
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of the losses of these samples, and sums for metrics."""
        config = self._config
        trained = self._trained
        features = trained.policy_features(samples.obs)
        if config.features == "frozen":
            features = features.detach()
        values = self._value(features)
        if not isinstance(config.algorithm, IQL):
            returns = as_tensor(recorded.returns[samples.indices], self._device)
            advantages = (returns - values).detach()
            critic_losses = (values - returns).square() / 2
        else:
            q_values, lowest = self._q_values(features, samples.actions)
            advantages = (lowest - values).detach()
            critic_losses = expectile_loss(lowest - values, config.algorithm.expectile)
            targets = self._bootstrap_targets(samples, recorded)
            critic_losses = critic_losses + (q_values - targets).square().sum(0)
        weights = advantage_weights(advantages, config.temperature, config.max_weight)
        losses = trained.imitation_losses(samples.obs, samples.actions)
        clones = self._updates >= config.critic_steps
        loss = critic_losses.sum() + (weights * losses).sum() * clones
        return loss, {
            "loss/imitation": losses.detach().sum(),
            "loss/value": critic_losses.detach().sum(),
            "offline/value": values.detach().sum(),
            "offline/advantage": advantages.sum(),
            "offline/weight": weights.sum(),
        }

    def _q_values(self, features: torch.Tensor, actions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the Q-values [2, B] of recorded chunks, and the lower one of the target networks [B]."""
        assert self._q is not None and self._target_q is not None
        inputs = self._critic_inputs(features, as_tensor(actions, self._device))
        with torch.no_grad():
            lowest = self._target_q(inputs).min(0).values
        return self._q(inputs), lowest

    @torch.no_grad()
    def _bootstrap_targets(self, samples: RecordingBatch, recorded: RecordedReturns) -> torch.Tensor:
        """Return rewards + discount^C V(s'), [B]; V is 0 after the end of an episode."""
        targets = as_tensor(recorded.rewards[samples.indices], self._device).clone()
        if samples.following is not None:
            values = self._value(self._trained.policy_features(samples.following))
            rows = torch.as_tensor(samples.rows, device=self._device)
            targets[rows] += self._discount ** samples.actions.shape[1] * values
        return targets
