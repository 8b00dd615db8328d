"""Trainers of recordings with rewards: the policy clones, by what networks of the trainer's own have learnt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import nn

from vla_rl.core.errors import UserError
from vla_rl.core.trainers import DemonstrationsData, ImitationStep, Trainer, UpdateMetrics
from vla_rl.core.types import Array, Observation
from vla_rl.toolkit.algorithms.statistics import MetricAccumulator
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.optimizer import FiniteGuard
from vla_rl.toolkit.trainers.reader import read_ahead, read_samples
from vla_rl.toolkit.trainers.recorded_returns import RecordedReturns, read_returns


@frozen(eq=False)
class RecordingBatch:
    """Micro-batch of B samples of a recording."""

    indices: Array
    """Indices into the recording, int64 [B]."""
    first: int
    """Number of the first sample within the optimiser step, over all ranks."""
    obs: Observation
    actions: Any
    rows: Array
    """Rows of the samples that are followed by another one, int64 [K]."""
    following: Observation | None
    """Observations of the samples that follow those rows, [K]; None where none is needed."""


class RecordingTrainer(Trainer[DemonstrationsData]):
    """Trainer of the policy and of networks of its own, which one optimiser (Adam) trains."""

    name: str
    """Name in specs and messages."""
    optimizer_name: str
    """Name of the networks' optimiser in checkpoints."""
    unsharded: str
    """What the trainer does not shard, for a message."""

    def __init__(self, config: Any, context: TrainerContext, networks: Mapping[str, nn.Module], guarded: str) -> None:
        """Create the optimiser of the networks (name -> network).

        Args:
            config: settings with `lr`, of the networks, and `discount`, of rewards.
            guarded: what the networks are, for messages.
        """
        self._trained = context.trained
        self._heartbeat = context.heartbeat
        self._device = torch.device(context.trained.device)
        self._discount: float = config.discount
        self._networks = networks
        self._parameters = [p for network in networks.values() for p in network.parameters()]
        self._optimizer = torch.optim.Adam(self._parameters, lr=config.lr, fused=True)
        self._guard = FiniteGuard(guarded)
        self._updates = 0
        """Optimiser steps so far."""
        self._recorded: RecordedReturns | None = None

    def modules(self) -> Mapping[str, nn.Module]:
        return {"policy": self._trained.model.module, **self._networks}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return {"policy": self._trained.optimizer, self.optimizer_name: self._optimizer}

    def state(self) -> Mapping[str, Any]:
        return {"updates": self._updates}

    def load(self, state: Mapping[str, Any]) -> None:
        self._updates = state["updates"]

    def update(self, data: DemonstrationsData) -> UpdateMetrics:
        """Make optimiser steps; sums are this rank's. UserError for recordings without rewards or of equal returns."""
        before = perf_counter()
        if self._trained.strategy.lockstep:
            raise UserError(f"trainer {self.name!r} {self.unsharded}; set train.sharding: replicated")
        recording = data.demonstrations
        if recording is None:
            raise UserError(f"trainer {self.name!r} needs recordings with rewards; give imitation.data")
        if self._recorded is None or self._recorded.recording is not recording:
            self._recorded = read_returns(recording, self._discount, self.name)
        metrics = MetricAccumulator({"loss/imitation": torch.zeros((), device=self._device)})
        with self._trained.released():
            self.make_steps(self._recorded, data.steps, metrics)
            self._trained.check_finite()
            self._guard.check_finite()
        return metrics.read_metrics(perf_counter() - before)

    @abstractmethod
    def make_steps(self, recorded: RecordedReturns, steps: Sequence[ImitationStep], metrics: MetricAccumulator) -> None:
        """Make these optimiser steps, and add their metrics."""

    def read_steps(
        self, recorded: RecordedReturns, steps: Sequence[ImitationStep], bootstraps: bool = False
    ) -> Iterator[RecordingBatch]:
        """Return the micro-batches of optimiser steps, which are read ahead. `bootstraps`: with what follows."""
        size = self._trained.train.micro_batch

        def read_batch(step: ImitationStep, start: int) -> RecordingBatch:
            indices = step.indices[start : start + size]
            obs, actions = read_samples(recorded.recording, step, start, size)
            next_samples = recorded.following[indices]
            rows = np.flatnonzero(next_samples >= 0)
            following = None
            if bootstraps and len(rows):
                following, _ = recorded.recording.read_samples(next_samples[rows])
            return RecordingBatch(indices, step.first + start, obs, actions, rows, following)

        return read_ahead(read_batch, steps, size)

    def step_networks(self, loss: torch.Tensor) -> None:
        """Make a step of the networks with the gradients of all ranks, unless the loss is not finite."""
        self._trained.strategy.reduce(self._parameters)
        self._guard.guard_step(self._optimizer, loss, "imitation")
