"""Soft actor-critic for chunks, on the policy's features.

The state of the decision process is an observation, its action a whole chunk. Q-networks take features and the chunk,
scaled to [-1, 1]. As in DrQ-v2 (Yarats et al. 2021, arXiv:2107.09645) the critics' loss trains the features, the
policy's loss trains its head alone, and targets use the features of the newest weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.core.capabilities import Reparameterised
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.randomness import derived_seed, generator
from vla_rl.core.trainers import Trainer, Transitions, TransitionsData, UpdateMetrics
from vla_rl.core.types import Array, Observation, to_numpy
from vla_rl.plugins.trainers.off_policy.config import Learned, OffPolicyConfig
from vla_rl.plugins.trainers.off_policy.demonstrations import DemonstratedTransitions
from vla_rl.plugins.trainers.off_policy.losses import (
    actor_losses,
    cloning_losses,
    critic_losses,
    ensemble_value,
    soft_targets,
    temperature_losses,
)
from vla_rl.toolkit.algorithms.statistics import MetricAccumulator
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.trainers import optimizer
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.critics import CriticEnsemble, CriticInputs, check_features, feature_size, update_target
from vla_rl.toolkit.trainers.reader import read_in_background
from vla_rl.toolkit.trainers.replay import TransitionBatch, TransitionBuffer
from vla_rl.toolkit.trainers.takeovers import ended_by_takeovers, find_corrections, with_last_action_repeated


class _Temperature(nn.Module):
    """The learned temperature, by its logarithm."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(initial)))

    def forward(self) -> Tensor:
        return self.log.exp()


class OffPolicy(Trainer[TransitionsData]):
    """Trainer of the policy, of critics of its chunks and of a temperature, from transitions that it keeps."""

    name = "off_policy"
    """Name of the trainer, in messages."""

    def __init__(self, config: OffPolicyConfig, context: TrainerContext) -> None:
        """Create critics and an empty buffer. Raises UserError for a model without features or without reparameterised
        actions, and for keys about takeovers in a simulator that has none."""
        trained = context.trained
        self._trained = trained
        self._check_model()
        if context.folder is None:
            raise UserError(f"trainer {self.name!r} keeps transitions in the run folder, and here there is none")
        demonstrations = config.demonstrations
        self._corrects = demonstrations is not None and demonstrations.corrections
        """Whether chunks of whoever took over count as demonstrations."""
        self._demonstration_cloning = 0.0 if demonstrations is None else demonstrations.cloning
        takeovers = {"demonstrations.corrections": self._corrects, "takeovers": config.takeovers == "end"}
        for key, requested in takeovers.items():
            if requested and not trained.info.takeovers:
                raise UserError(
                    f"trainer.{key} is for simulators with takeovers (EnvInfo.takeovers); give "
                    "gym_hil a person, gymnasium `interventions`, or leave it out"
                )
        self._config = config
        self._heartbeat = context.heartbeat
        self._seed = context.seed
        self._updates = 0
        """Updates so far."""
        self._device = torch.device(trained.device)
        self._chunk = context.chunk
        self._demonstrations: DemonstratedTransitions | None = None
        self._demonstrated = 0 if demonstrations is None else round(demonstrations.share * config.batch)
        """Transitions of a batch that come from demonstrations: its last ones."""
        self._corrections: list[int] = []
        """Numbers of the buffer's transitions that count as demonstrations."""
        self._inputs = CriticInputs(*self._action_bounds(), self._device)
        shape = self._action_shape()
        numbers = shape[0] * shape[1]
        features = feature_size(trained)
        self._buffer = TransitionBuffer(
            context.folder,
            trained.info,
            context.chunk,
            config.capacity,
            config.discount,
            features=features if config.features == "frozen" else None,
            action_shape=shape,
        )
        seed = derived_seed(context.seed, "off_policy/critics")
        critics = CriticEnsemble(
            config.critics, features + numbers, config.hidden, layer_norm=config.layer_norm, seed=seed
        )
        self._critics = critics.to(trained.device)
        self._target_critics = copy.deepcopy(self._critics).requires_grad_(False)
        self._critic_parameters = list(self._critics.parameters())
        self._critic_optimizer = torch.optim.Adam(self._critic_parameters, lr=config.lr, fused=True)
        self._temperature: _Temperature | None = None
        self._temperature_optimizer: torch.optim.Optimizer | None = None
        self._target_entropy = float(-numbers)
        if isinstance(config.temperature, Learned):
            learned = config.temperature.learned
            if learned.target_entropy is not None:
                self._target_entropy = float(learned.target_entropy)
            self._temperature = _Temperature(learned.initial).to(trained.device)
            self._temperature_optimizer = torch.optim.Adam(self._temperature.parameters(), lr=learned.lr, fused=True)
        self._guard = optimizer.FiniteGuard("critics")

    # -------------------------------------------------------------------------------------- the decision process

    def _check_model(self) -> None:
        """Raises UserError for a model that the trainer cannot train."""
        check_features(self._trained, self.name)
        if not isinstance(self._trained.model, Reparameterised):
            raise UserError(
                f"trainer {self.name!r} needs actions with a gradient, and model {self._trained.name!r} gives none "
                f"(no vla_rl.Reparameterised); film_resnet does with network: {{head: {{type: gaussian}}}}"
            )

    def _action_shape(self) -> tuple[int, int]:
        """Return the shape of one action of the decision process."""
        return self._chunk, self._trained.info.action_dim

    def _action_bounds(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return the least and the largest value of each number of an action."""
        return self._trained.info.action_low, self._trained.info.action_high

    def _select_kept(self, transitions: Transitions) -> Transitions | None:
        """Return what the buffer keeps of new transitions; None: nothing."""
        return transitions

    def _sample_actions(self, features: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
        """Return sampled actions [B, *action shape] of the decision process and their log-probs, with gradient."""
        return self._trained.reparameterised_actions(features, normals)

    # ------------------------------------------------------------------------------------------------ the contract

    def modules(self) -> Mapping[str, nn.Module]:
        learned: dict[str, nn.Module] = {} if self._temperature is None else {"temperature": self._temperature}
        return {"policy": self._trained.model.module, "critics": self._critics, **learned}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        learned = {} if self._temperature_optimizer is None else {"temperature": self._temperature_optimizer}
        return {"policy": self._trained.optimizer, "critics": self._critic_optimizer, **learned}

    def targets(self) -> Mapping[str, nn.Module]:
        return {"critics": self._target_critics}

    def state(self) -> Mapping[str, Any]:
        corrected = {"corrections": list(self._corrections)} if self._corrects else {}
        return {"updates": self._updates, "buffer": self._buffer.state(), **corrected}

    def load(self, state: Mapping[str, Any]) -> None:
        self._updates = state["updates"]
        self._corrections = list(state.get("corrections", ()))
        self._buffer.load(state["buffer"])

    def update(self, data: TransitionsData) -> UpdateMetrics:
        """Keep new transitions, and make the updates that are due for them. Raises UserError for several learners, for
        demonstrations that do not fit, and where the disk is full."""
        before = perf_counter()
        trained = self._trained
        config = self._config
        if trained.strategy.world > 1:
            raise UserError(f"trainer {self.name!r} keeps its transitions on one learner; place one")
        with trained.released():
            self._keep_transitions(data)
            due = max(
                0,
                math.floor(config.updates_per_step * (self._buffer.transition_count - config.min_data)) - self._updates,
            )
            numbers = range(self._updates + 1, self._updates + due + 1)
            due_of_actor = sum(map(self._is_policy_update, numbers))
            metrics = MetricAccumulator({"off_policy/updates": torch.tensor(float(due), device=self._device)})
            optimizer.set_rates(trained.optimizer, trained.train, trained.train.factor(data.step))
            for number, batch in zip(numbers, read_in_background(self._draw_batch, numbers), strict=True):
                of_critics, of_actor = self._make_update(number, batch, f"step {data.step}")
                metrics.add_sums(of_critics, due)
                metrics.add_sums(of_actor, due_of_actor)
                self._updates = number
            trained.check_finite()
            self._guard.check_finite()
        metrics.add_sums({"off_policy/transitions": torch.tensor(float(len(self._buffer)), device=self._device)})
        if self._corrects:
            count = torch.tensor(float(len(self._corrections)), device=self._device)
            metrics.add_sums({"off_policy/corrections": count})
        return metrics.read_metrics(perf_counter() - before)

    # ------------------------------------------------------------------------------------------------ batches

    def _keep_transitions(self, data: TransitionsData) -> None:
        """Keep new transitions, with features instead of frames where these never change."""
        frozen = self._config.features == "frozen"
        kept = None if data.transitions is None else self._select_kept(data.transitions)
        if kept is not None:
            if self._config.takeovers == "end":
                kept = ended_by_takeovers(kept)
            if self._corrects:
                kept = with_last_action_repeated(kept)
            begin = self._buffer.transition_count
            self._buffer.add(kept, self._encode_observations(kept.frames) if frozen else None)
            if self._corrects:
                numbers = [*self._corrections, *(begin + find_corrections(kept)).tolist()]
                self._corrections = [number for number in numbers if number >= self._buffer.oldest_transition]
        if self._config.demonstrations is not None:
            self._read_demonstrations(data.demonstrations)

    @torch.no_grad()
    def _encode_observations(self, obs: Observation) -> Array:
        """Return the features of observations, float32 [B, D]."""
        features = []
        for rows in self._micro_batches(len(obs)):
            self._heartbeat()
            features.append(to_numpy(self._trained.policy_features(obs.take(rows)).float()))
        return np.concatenate(features)

    def _read_demonstrations(self, recording: Demonstrations | None) -> None:
        if recording is None:
            raise UserError(
                "trainer 'off_policy' takes demonstrations into each batch (trainer.demonstrations), and there are "
                "none; name a recording in imitation.data, or leave trainer.demonstrations out"
            )
        if self._demonstrations is None or self._demonstrations.recording is not recording:
            info = self._trained.info
            encode = self._encode_observations if self._config.features == "frozen" else None
            self._demonstrations = DemonstratedTransitions(recording, info, self._chunk, self._config.discount, encode)

    def _draw_batch(self, number: int) -> TransitionBatch:
        """Return the transitions of an update, which its number alone decides."""
        draws = generator(self._seed, "off_policy/batch", number)
        numbers = draws.integers(
            self._buffer.oldest_transition, self._buffer.transition_count, self._config.batch - self._demonstrated
        )
        recorded = self._demonstrations
        if recorded is None or self._demonstrated == 0:
            return self._buffer.read_transitions(numbers)
        rows = draws.integers(0, len(recorded) + len(self._corrections), self._demonstrated)
        corrected = [self._corrections[row - len(recorded)] for row in rows if row >= len(recorded)]
        collected = self._buffer.read_transitions(np.concatenate([numbers, np.array(corrected, np.int64)]))
        if len(corrected) == self._demonstrated:
            return collected
        return TransitionBatch.concat([collected, recorded.read_batch(rows[rows < len(recorded)])])

    # ------------------------------------------------------------------------------------------------ updates

    def _is_policy_update(self, number: int) -> bool:
        """Return whether an update is also one of policy and temperature."""
        config = self._config
        return number > config.critic_updates and number % config.actor_interval == 0

    def _make_update(
        self, number: int, batch: TransitionBatch, where: str
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Make one update. Return means over its batch, of the critics' passes and of the policy's."""
        trained = self._trained
        config = self._config
        draws = generator(self._seed, "off_policy/noise", number)
        shape = batch.actions.shape
        next_normals, normals = draws.standard_normal((2, *shape), np.float32)
        chosen = draws.permutation(config.critics)[: config.target_critics].tolist()
        trained.optimizer.zero_grad(set_to_none=True)
        trains_features = config.features == "trained" and number > config.critic_updates
        sums, features = self._critic_passes(batch, next_normals, chosen, trains_features)
        self._guard.guard_step(self._critic_optimizer, sums["loss/critic"], where)
        update_target(self._target_critics, self._critics, config.target_rate)
        of_actor: dict[str, Tensor] = {}
        loss = sums["loss/critic"]
        if self._is_policy_update(number):
            of_actor = self._actor_passes(features, normals, batch.actions)
            loss = loss + of_actor["loss/actor"]
            if self._temperature_optimizer is not None:
                self._guard.guard_step(self._temperature_optimizer, of_actor["loss/temperature"], where)
        if of_actor or trains_features:
            trained.optimizer_step(where, loss)
        return sums, of_actor

    def _critic_passes(
        self, batch: TransitionBatch, next_normals: Array, chosen: Sequence[int], trains_features: bool
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Run the passes of the critics' loss. Return means over the batch, and the features of each micro-batch."""
        self._critic_optimizer.zero_grad(set_to_none=True)
        sums = MetricAccumulator()
        kept = []
        for rows in self._micro_batches(len(batch)):
            self._heartbeat()
            part = batch.take(rows)
            targets = self._compute_targets(part, next_normals[rows], chosen)
            with torch.set_grad_enabled(trains_features):
                features = self._compute_features(part.obs)
            q_values = self._critics(self._inputs(features, as_tensor(part.actions, self._device)))
            loss = critic_losses(q_values, targets).sum() / len(batch)
            loss.backward()
            kept.append(features.detach())
            means = {"loss/critic": loss.detach(), "off_policy/q": q_values.detach().mean(0).sum() / len(batch)}
            sums.add_sums(means)
        return sums.sums, kept

    @torch.no_grad()
    def _compute_targets(self, part: TransitionBatch, normals: Array, chosen: Sequence[int]) -> Tensor:
        """Return the targets [B] of the critics, by the target networks that were drawn."""
        features = self._compute_features(part.following)
        actions, log_probs = self._sample_actions(features, as_tensor(normals, self._device))
        inputs = self._inputs(features, actions)
        return soft_targets(
            as_tensor(part.rewards, self._device),
            as_tensor(part.bootstrap, self._device),
            torch.stack([self._target_critics.critics[i](inputs) for i in chosen]),
            log_probs.sum((1, 2)) if self._config.entropy_backup else None,
            self._entropy_weight(),
        )

    def _actor_passes(self, features: Sequence[Tensor], normals: Array, executed: Array) -> dict[str, Tensor]:
        """Run the passes of the losses of policy and temperature. Return means over the batch.

        Args:
            features: features of each micro-batch.
            normals: standard normal numbers for the policy's actions, [B, *action shape].
            executed: actions of the batch, [B, *action shape].
        """
        config = self._config
        count = len(normals)
        sums = MetricAccumulator()
        if self._temperature_optimizer is not None:
            self._temperature_optimizer.zero_grad(set_to_none=True)
        self._let_critics_learn(False)
        for part, rows in zip(features, self._micro_batches(count), strict=True):
            self._heartbeat()
            actions, log_probs = self._sample_actions(part, as_tensor(normals[rows], self._device))
            chunk_log_probs = log_probs.sum((1, 2))
            q_values = self._critics(self._inputs(part, actions))
            values = ensemble_value(q_values, mean=config.actor_value == "mean")
            losses = actor_losses(self._entropy_weight(), chunk_log_probs, values)
            means = {"off_policy/entropy": -chunk_log_probs.detach().sum() / count}
            if config.cloning:
                executed_part = as_tensor(executed[rows], self._device)
                distances = cloning_losses(
                    self._inputs.scale_actions(actions), self._inputs.scale_actions(executed_part)
                )
                losses = losses + config.cloning * distances
                means["off_policy/cloning"] = distances.detach().sum() / count
            loss = losses.sum() / count
            if self._demonstration_cloning:
                errors = self._demonstration_errors(part, executed[rows], rows >= count - self._demonstrated)
                error = errors.sum() / self._demonstrated
                loss = loss + self._demonstration_cloning * error
                means["off_policy/demonstration_cloning"] = error.detach()
            loss.backward()
            means["loss/actor"] = loss.detach()
            if self._temperature is not None:
                temperature_loss = temperature_losses(self._temperature(), chunk_log_probs, self._target_entropy)
                mean = temperature_loss.sum() / count
                mean.backward()
                means["loss/temperature"] = mean.detach()
            sums.add_sums(means)
        self._let_critics_learn(True)
        sums.add_sums({"off_policy/temperature": self._entropy_weight()})
        return sums.sums

    def _demonstration_errors(self, features: Tensor, executed: Array, demonstrated: Array) -> Tensor:
        """Return the errors of the policy's likeliest actions, mean squares [B]; 0 in rows without a demonstration."""
        likeliest, _ = self._sample_actions(features, as_tensor(np.zeros_like(executed), self._device))
        errors = cloning_losses(
            self._inputs.scale_actions(likeliest), self._inputs.scale_actions(as_tensor(executed, self._device))
        )
        return errors * as_tensor(demonstrated, self._device)

    def _let_critics_learn(self, learn: bool) -> None:
        for parameter in self._critic_parameters:  # a list: to walk the modules takes a tenth of an update
            parameter.requires_grad_(learn)

    def _entropy_weight(self) -> Tensor:
        """Return the weight of the entropy, without gradient."""
        if self._temperature is not None:
            return self._temperature.log.detach().exp()
        assert not isinstance(self._config.temperature, Learned)
        return torch.full((), self._config.temperature, device=self._device)

    def _compute_features(self, obs: Observation | Array) -> Tensor:
        """Return the features [B, D] of observations, or those that the buffer kept."""
        if isinstance(obs, Observation):
            return self._trained.policy_features(obs)
        return as_tensor(obs, self._device)

    def _micro_batches(self, count: int) -> list[Array]:
        size = self._trained.train.micro_batch
        return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
