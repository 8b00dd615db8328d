"""Advantage-conditioned cloning of recorded episodes (RECAP: Amin et al. 2025, arXiv:2511.14759).

1. A separate distributional value function V(s) regresses on recorded returns: the cross-entropy with the atom that
   is nearest to the return.
2. Each sample is labelled once: positive if its advantage reaches the threshold of its task, or if a person chose its
   action.
3. The policy clones all samples, with the label as text after the instruction. A share of them has no label.

The policy acts with the label "positive" (`TrainerPlugin.instruction_suffix`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import nn

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.randomness import derived_seed, generator
from vla_rl.core.trainers import DemonstrationsData, ImitationStep, Trainer, UpdateMetrics
from vla_rl.core.types import Array, Observation
from vla_rl.plugins.trainers.recap.config import RecapConfig
from vla_rl.plugins.trainers.recap.label import NEGATIVE, POSITIVE
from vla_rl.plugins.trainers.recap.value_network import build_value_network, categorical_targets, expected_values
from vla_rl.toolkit.algorithms.statistics import MetricAccumulator
from vla_rl.toolkit.models.instructions import without_suffix
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.trainers import optimizer
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.demonstration_reader import read_ahead, read_samples
from vla_rl.toolkit.trainers.recorded_returns import RecordedReturns, read_returns


@frozen(eq=False)
class _Samples:
    """Samples of a micro-batch."""

    indices: Array
    """Indices into the recording, int64 [B]."""
    first: int
    """Number of the first one within the optimiser step, over all ranks."""
    obs: Observation
    actions: Any


@frozen(eq=False)
class _Recording:
    """A recording with what is known of its samples."""

    demonstrations: Demonstrations
    recorded: RecordedReturns
    atoms: torch.Tensor
    """Returns of the value function's distribution, float32 [N]."""


class Recap(Trainer[DemonstrationsData]):
    """Trainer of a value function, and then of the policy conditioned on advantages."""

    def __init__(self, config: RecapConfig, context: TrainerContext) -> None:
        info = context.trained.info
        self._config = config
        self._seed = context.seed
        self._trained = context.trained
        self._heartbeat = context.heartbeat
        self._updates = 0
        """Optimiser steps so far."""
        self._device = torch.device(context.trained.device)
        self._value = build_value_network(
            tuple(info.cameras),
            info.state_dim,
            config.atoms,
            derived_seed(context.seed, "recap/value"),
            self._device,
        )
        self._parameters = list(self._value.parameters())
        self._optimizer = torch.optim.Adam(self._parameters, lr=config.lr, fused=True)
        self._guard = optimizer.FiniteGuard("value function")
        self._recording: _Recording | None = None
        self._labels: Array | None = None
        """Whether each sample is positive, bool [n]; None: the value function has not labelled them yet."""

    def modules(self) -> Mapping[str, nn.Module]:
        return {"policy": self._trained.model.module, "value": self._value}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return {"policy": self._trained.optimizer, "value": self._optimizer}

    def state(self) -> Mapping[str, Any]:
        """Return the number of optimiser steps, and the labels, bool [n], or [0] before there are any."""
        labels = torch.zeros(0, dtype=torch.bool) if self._labels is None else torch.from_numpy(self._labels.copy())
        return {"updates": self._updates, "labels": labels}

    def load(self, state: Mapping[str, Any]) -> None:
        self._updates = state["updates"]
        self._labels = state["labels"].numpy() if len(state["labels"]) else None

    def update(self, data: DemonstrationsData) -> UpdateMetrics:
        """Make optimiser steps, in micro-batches. Sums are over this rank's samples. Raises UserError for recordings
        without rewards, or with equal returns."""
        before = perf_counter()
        trained = self._trained
        if trained.strategy.lockstep:
            raise UserError("trainer 'recap' does not shard the model; set train.sharding: replicated")
        if data.demonstrations is None:
            raise UserError("trainer 'recap' needs recordings with rewards; give imitation.data")
        recording = self._read_recording(data.demonstrations)
        metrics = MetricAccumulator({"loss/imitation": torch.zeros((), device=trained.device)})
        critic_steps = data.steps[: max(0, self._config.critic_steps - self._updates)]
        policy_steps = data.steps[len(critic_steps) :]
        with trained.released():
            samples = self._read_samples(recording, critic_steps)
            for step in critic_steps:
                self._value_step(step, samples, recording, metrics)
            if policy_steps and self._labels is None:
                self._labels = self._label_samples(recording)
            samples = self._read_samples(recording, policy_steps)
            with without_suffix(trained.model):
                for step in policy_steps:
                    self._policy_step(step, samples, metrics)
            trained.check_finite()
            self._guard.check_finite()
        return metrics.read_metrics(perf_counter() - before)

    def _read_samples(self, recording: _Recording, steps: Sequence[ImitationStep]) -> Iterator[_Samples]:
        size = self._trained.train.micro_batch

        def read_batch(step: ImitationStep, start: int) -> _Samples:
            obs, actions = read_samples(recording.demonstrations, step, start, size)
            return _Samples(step.indices[start : start + size], step.first + start, obs, actions)

        return read_ahead(read_batch, steps, size)

    # ------------------------------------------------------------------------------------------ value function

    def _value_step(
        self, step: ImitationStep, samples: Iterator[_Samples], recording: _Recording, metrics: MetricAccumulator
    ) -> None:
        """Make one optimiser step of the value function on the next samples."""
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self._device)
        for _ in range(0, len(step.indices), self._trained.train.micro_batch):
            self._heartbeat()
            batch = next(samples)
            returns = as_tensor(recording.recorded.returns[batch.indices], self._device)
            logits = self._value(batch.obs)
            losses = F.cross_entropy(logits, categorical_targets(returns, recording.atoms), reduction="sum")
            (losses / step.total).backward()
            total = total + losses.detach()
            values = expected_values(logits.detach(), recording.atoms)
            metrics.add_sums({"loss/value": losses.detach(), "recap/value": values.sum()})
        self._trained.strategy.reduce(self._parameters)
        self._guard.guard_step(self._optimizer, total, "imitation")
        self._updates += 1

    @torch.no_grad()
    def _label_samples(self, recording: _Recording) -> Array:
        """Return whether each sample is positive, bool [n]. Raises UserError where none is."""
        size = self._trained.train.micro_batch
        count = recording.demonstrations.num_samples()
        values = []
        tasks: list[str] = []
        for start in range(0, count, size):
            self._heartbeat()
            obs, _ = recording.demonstrations.read_samples(np.arange(start, min(start + size, count)))
            values.append(expected_values(self._value(obs), recording.atoms))
            tasks += obs.instructions
        advantages = recording.recorded.compute_advantages(torch.cat(values).cpu().numpy(), self._config.horizon)
        labels = positive_labels(advantages, tasks, self._config.positive_share, recording.recorded.interventions)
        if not labels.any():
            raise UserError(
                f"none of {count} recorded samples has a larger advantage than the others of its task: nothing tells "
                f"good actions from bad ones; record more, or use behaviour_cloning"
            )
        return labels

    def _read_recording(self, demonstrations: Demonstrations) -> _Recording:
        """Return the recording, whose rewards are read once."""
        if self._recording is None or self._recording.demonstrations is not demonstrations:
            recorded = read_returns(demonstrations, self._config.discount, "recap")
            low, high = float(recorded.returns.min()), float(recorded.returns.max())
            atoms = torch.linspace(low, high, self._config.atoms, device=self._device)
            self._recording = _Recording(demonstrations, recorded, atoms)
        count = demonstrations.num_samples()
        if self._labels is not None and len(self._labels) != count:
            raise UserError(
                f"the recording had {len(self._labels)} samples when trainer 'recap' labelled them, and has {count} "
                f"now; begin a new run"
            )
        return self._recording

    # -------------------------------------------------------------------------------------------------- policy

    def _policy_step(self, step: ImitationStep, samples: Iterator[_Samples], metrics: MetricAccumulator) -> None:
        """Make one optimiser step of the policy on the next samples."""
        trained = self._trained
        assert self._labels is not None
        optimizer.set_rate(trained.optimizer, step.lr)
        trained.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self._device)
        dropped = generator(self._seed, "recap/dropout", step.number).random(step.total) < self._config.dropout
        with trained.adapters_cast_once():
            for _ in range(0, len(step.indices), trained.train.micro_batch):
                self._heartbeat()
                batch = next(samples)
                labels = self._labels[batch.indices]
                without = dropped[batch.first : batch.first + len(batch.indices)]
                obs = condition_on_labels(batch.obs, labels, without)
                loss = trained.imitation_loss(obs, batch.actions) * len(batch.indices)
                (loss / step.total).backward()
                total = total + loss.detach()
                positive = torch.tensor(float(labels.sum()), device=self._device)
                metrics.add_sums({"loss/imitation": loss.detach(), "recap/positive": positive})
        trained.optimizer_step("imitation", total)
        self._updates += 1


def positive_labels(advantages: Array, tasks: Sequence[str], share: float, interventions: Array) -> Array:
    """Return whether each sample is positive, bool [n]: its advantage reaches the threshold of its task, which a share
    of the samples that the policy chose does, or it is an intervention. Equal advantages have equal labels, and the
    lowest one of a task is never positive.

    Args:
        advantages: float32 [n].
        tasks: instruction of each sample.
        share: share of each task's samples that is positive.
        interventions: bool [n].
    """
    labels = interventions.copy()
    names = np.array(tasks)
    for task in np.unique(names):
        rows = np.flatnonzero((names == task) & ~interventions)
        if len(rows):
            of_task = advantages[rows]
            labels[rows] = (of_task >= np.quantile(of_task, 1 - share)) & (of_task > of_task.min())
    return labels


def condition_on_labels(obs: Observation, labels: Array, dropped: Array) -> Observation:
    """Return the observation with each sample's label (bool [B]) after its instruction, except where it is dropped
    (bool [B])."""
    texts = (
        text if without else text + (POSITIVE if label else NEGATIVE)
        for text, label, without in zip(obs.instructions, labels.tolist(), dropped.tolist(), strict=True)
    )
    return evolve(obs, instructions=tuple(texts))
