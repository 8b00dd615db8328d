"""Advantage-weighted cloning of recorded episodes.

Both algorithms clone recorded actions with weights exp(A / temperature). They differ in the critic:

AWR (Peng et al. 2019, arXiv:1910.00177, algorithm 1): V(s) regresses on recorded discounted returns R; A = R - V(s).
IQL (Kostrikov et al. 2021, arXiv:2110.06169): V(s) is an expectile of min Q'(s, a) over two target networks (eq. 5);
Q(s, a) regresses on r + discount^C V(s') (eq. 6); A = min Q'(s, a) - V(s) (eq. 7).

A state s' is what follows a chunk of C actions. An episode's end counts as its end whatever ended it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import nn

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.randomness import derived_seed
from vla_rl.core.trainers import DemonstrationsData, ImitationStep, Trainer, UpdateMetrics
from vla_rl.core.types import Array, Observation
from vla_rl.plugins.trainers.offline.config import IQL, OfflineConfig
from vla_rl.toolkit.algorithms.statistics import MetricAccumulator
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.trainers import optimizer
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
from vla_rl.toolkit.trainers.demonstration_reader import read_ahead, read_samples
from vla_rl.toolkit.trainers.recorded_returns import RecordedReturns, read_returns

CRITICS = 2
"""Q-networks, of which the lower value counts (clipped double Q-learning, Fujimoto et al. 2018)."""


@frozen(eq=False)
class _Samples:
    """B samples of a recording."""

    indices: Array
    obs: Observation
    actions: Any
    rows: Array
    """Rows of the samples that are followed by another one, int64 [K]."""
    following: Observation | None
    """Observations of the samples that follow those rows, [K]; None where none is needed."""


class Offline(Trainer[DemonstrationsData]):
    """Trainer of the policy and of critics on its features, from recordings."""

    def __init__(self, config: OfflineConfig, context: TrainerContext) -> None:
        """Create the critics. Raises UserError for a model without features."""
        trained = context.trained
        check_features(trained, "offline")
        self._config = config
        self._trained = trained
        self._heartbeat = context.heartbeat
        self._updates = 0
        """Optimiser steps so far."""
        self._recorded: tuple[Demonstrations, RecordedReturns] | None = None
        features = feature_size(trained)
        actions = context.chunk * trained.info.action_dim
        self._device = torch.device(trained.device)
        self._critic_inputs = CriticInputs(trained.info.action_low, trained.info.action_high, self._device)
        sizes: dict[str, Any] = {"hidden": config.hidden, "layer_norm": config.layer_norm}
        seed = derived_seed(context.seed, "offline/critics")
        self._value = Critic(features, seed=seed, **sizes).to(trained.device)
        self._q: CriticEnsemble | None = None
        self._target_q: CriticEnsemble | None = None
        if isinstance(config.algorithm, IQL):
            self._q = CriticEnsemble(CRITICS, features + actions, seed=seed + 1, **sizes).to(trained.device)
            self._target_q = copy.deepcopy(self._q).requires_grad_(False)
        self._critic_parameters = [
            p for name, part in self.modules().items() if name != "policy" for p in part.parameters()
        ]
        self._optimizer = torch.optim.Adam(self._critic_parameters, lr=config.lr, fused=True)
        self._guard = optimizer.FiniteGuard("critics")

    def modules(self) -> Mapping[str, nn.Module]:
        critics: dict[str, nn.Module] = {"value": self._value} | ({} if self._q is None else {"q": self._q})
        return {"policy": self._trained.model.module, **critics}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return {"policy": self._trained.optimizer, "critics": self._optimizer}

    def targets(self) -> Mapping[str, nn.Module]:
        return {} if self._target_q is None else {"q": self._target_q}

    def state(self) -> Mapping[str, Any]:
        return {"updates": self._updates}

    def load(self, state: Mapping[str, Any]) -> None:
        self._updates = state["updates"]

    def update(self, data: DemonstrationsData) -> UpdateMetrics:
        """Make optimiser steps, in micro-batches. Sums are over this rank's samples. Raises UserError for recordings
        without rewards, or with equal returns."""
        before = perf_counter()
        trained = self._trained
        if trained.strategy.lockstep:
            raise UserError("trainer 'offline' has critics that are not sharded; set train.sharding: replicated")
        if data.demonstrations is None:
            raise UserError("trainer 'offline' needs recordings with rewards; give imitation.data")
        recorded = self._read_returns(data.demonstrations)
        size = trained.train.micro_batch
        reader = _Reader(data.demonstrations, recorded, size, bootstraps=self._q is not None)
        samples = read_ahead(reader.read_batch, data.steps, size)
        metrics = MetricAccumulator({"loss/imitation": torch.zeros((), device=trained.device)})
        with trained.released():
            for step in data.steps:
                self._make_step(step, samples, recorded, metrics)
            trained.check_finite()
            self._guard.check_finite()
        return metrics.read_metrics(perf_counter() - before)

    def _make_step(
        self,
        step: ImitationStep,
        samples: Iterator[_Samples],
        recorded: RecordedReturns,
        metrics: MetricAccumulator,
    ) -> None:
        """Make one optimiser step on the next samples."""
        trained = self._trained
        optimizer.set_rate(trained.optimizer, step.lr)
        trained.optimizer.zero_grad(set_to_none=True)
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=trained.device)
        with trained.adapters_cast_once():
            for _ in range(0, len(step.indices), trained.train.micro_batch):
                self._heartbeat()
                loss, sums = self._compute_loss(next(samples), recorded)
                (loss / step.total).backward()
                total = total + loss.detach()
                metrics.add_sums(sums)
        trained.optimizer_step("imitation", total)
        trained.strategy.reduce(self._critic_parameters)
        self._guard.guard_step(self._optimizer, total, "imitation")
        algorithm = self._config.algorithm
        if self._q is not None and self._target_q is not None and isinstance(algorithm, IQL):
            update_target(self._target_q, self._q, algorithm.target_rate)
        self._updates += 1

    def _compute_loss(
        self, samples: _Samples, recorded: RecordedReturns
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
    def _bootstrap_targets(self, samples: _Samples, recorded: RecordedReturns) -> torch.Tensor:
        """Return rewards + discount^C V(s'), [B]; V is 0 after the end of an episode."""
        targets = as_tensor(recorded.rewards[samples.indices], self._device).clone()
        if samples.following is not None:
            values = self._value(self._trained.policy_features(samples.following))
            rows = torch.as_tensor(samples.rows, device=self._device)
            targets[rows] += self._config.discount ** samples.actions.shape[1] * values
        return targets

    def _read_returns(self, recording: Demonstrations) -> RecordedReturns:
        """Return what followed each sample, which is read once."""
        if self._recorded is None or self._recorded[0] is not recording:
            self._recorded = recording, read_returns(recording, self._config.discount, "offline")
        return self._recorded[1]


@frozen(eq=False)
class _Reader:
    """Reader of samples, and of the observations that follow them."""

    recording: Demonstrations
    recorded: RecordedReturns
    micro_batch: int
    bootstraps: bool
    """The observations that follow are needed."""

    def read_batch(self, step: ImitationStep, start: int) -> _Samples:
        indices = step.indices[start : start + self.micro_batch]
        obs, actions = read_samples(self.recording, step, start, self.micro_batch)
        following = self.recorded.following[indices]
        rows = np.flatnonzero(following >= 0)
        after = None
        if self.bootstraps and len(rows):
            after, _ = self.recording.read_samples(following[rows])
        return _Samples(indices, obs, actions, rows, after)
