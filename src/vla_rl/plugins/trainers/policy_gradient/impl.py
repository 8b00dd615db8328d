"""The policy update of one rank: forward and backward passes over its samples, and optimiser steps."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import torch
from attrs import evolve
from torch import nn

from vla_rl.core.capabilities import TrainsInParts
from vla_rl.core.trainers import (
    UNNORMALISED,
    OptimizerStep,
    Trainer,
    TrajectoryData,
    TrajectoryPart,
    UpdateMetrics,
)
from vla_rl.core.types import Batch, Scores
from vla_rl.toolkit.algorithms.policy_gradient import recompute_kl
from vla_rl.toolkit.algorithms.statistics import MetricAccumulator
from vla_rl.toolkit.no_settings import NoSettings
from vla_rl.toolkit.trainers import optimizer
from vla_rl.toolkit.trainers.context import TrainerContext
from vla_rl.toolkit.trainers.gradient_accumulator import GradientAccumulator
from vla_rl.toolkit.trainers.micro_batches import MicroBatches


class PolicyGradient(Trainer[TrajectoryData], TrainsInParts):
    """Trainer of the policy by an algorithm's loss."""

    def __init__(self, config: NoSettings, context: TrainerContext) -> None:
        self.batches = MicroBatches(context.trained, context.algorithm)
        self._trained = context.trained
        self._algorithm = context.algorithm
        self._heartbeat = context.heartbeat
        self._compare_acting = context.compare_acting
        self.restart()

    def modules(self) -> Mapping[str, nn.Module]:
        return {"policy": self._trained.model.module}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        return {"policy": self._trained.optimizer}

    def restart(self) -> None:
        """Begin a training step without samples, and free the samples of the last one."""
        self._comparison = MetricAccumulator()
        """Comparison of recomputed log-probs with those of acting, over the samples of the first optimiser step."""
        self._accumulator: GradientAccumulator | None = None
        """Gradients of the parts that came before `update`; None: all samples come with `update`."""

    def update(self, data: TrajectoryData) -> UpdateMetrics:
        """Make all optimiser steps of a training step. Sums, added over ranks, are means over the optimiser steps."""
        before = perf_counter()
        accumulator, trained = self._accumulator, self._trained
        metrics = MetricAccumulator({"loss/total": torch.zeros((), device=trained.device)})
        norms: list[torch.Tensor] = []
        with trained.released():
            optimizer.set_rates(trained.optimizer, trained.train, trained.train.factor(data.step))
            if accumulator is not None:
                before -= accumulator.seconds  # the parts' passes belong to the update
                inputs, fields, steps = accumulator.plan_epochs(data.steps)
                data = evolve(data, inputs=inputs, fields=fields, steps=steps)
            for index, step in enumerate(data.steps):
                if step.accumulated:
                    assert accumulator is not None
                    loss = accumulator.normalise_gradients(step, metrics, len(data.steps))
                else:
                    loss = self._run_passes(data, step, metrics, first=index == 0)
                critic_only = data.step <= trained.train.critic_warmup_steps
                norms.append(trained.optimizer_step(f"step {data.step}", loss, critic_only))
            metrics.add({}, self._comparison.statistics)
            if accumulator is not None:
                accumulator.check_linear()
            trained.check_finite()
            self.restart()
        metrics.maxima["policy/grad_norm"] = torch.stack([torch.zeros((), device=trained.device), *norms]).max()
        return metrics.read_metrics(perf_counter() - before)

    def accumulate(self, data: TrajectoryPart) -> None:
        self._trained.strategy.release_weights()  # the policy acts again after `update`
        if data.first:
            self._trained.optimizer.zero_grad(set_to_none=True)
            self.restart()
            self._accumulator = GradientAccumulator(
                self._trained.parameters, self._algorithm.loss, keep_samples=self._trained.train.epochs > 1
            )
        accumulator = self._accumulator
        assert accumulator is not None, "the first part of a training step comes first"
        with accumulator.accumulate_part(data), self._trained.adapters_cast_once():
            for batch in self.batches.iterate_batches(
                data.inputs, data.fields, data.micro_batches, UNNORMALISED, data.version
            ):
                self._heartbeat()
                scores = self._trained.scores(batch)
                self._add_comparison(scores, batch)
                accumulator.add_batch(scores, batch)
            for _ in range(self._trained.dummy_passes(data.passes, len(data.micro_batches))):
                self._heartbeat()
                batch = self.batches.build_dummy(data.fields, UNNORMALISED, data.version)
                accumulator.add_batch(self._trained.scores(batch), batch, counts=False)

    def _run_passes(
        self, data: TrajectoryData, step: OptimizerStep, metrics: MetricAccumulator, first: bool
    ) -> torch.Tensor:
        """Run the passes of all micro-batches of an optimiser step. `first`: of the training step. Return the loss."""
        count = len(data.steps)
        trained = self._trained
        trained.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=trained.device)
        with trained.adapters_cast_once():
            for batch in self.batches.iterate_batches(data.inputs, data.fields, step.micro_batches, step, data.version):
                self._heartbeat()
                scores = trained.scores(batch)
                if first:
                    self._add_comparison(scores, batch)
                loss = self._algorithm.loss(scores, batch)
                loss.total.backward()
                total = total + loss.total.detach()
                metrics.add_sums(loss.metrics, count)
                metrics.add(loss.maxima, loss.statistics)
        metrics.add_sums({"loss/total": total}, count)
        for _ in range(trained.dummy_passes(step.passes, len(step.micro_batches))):
            self._heartbeat()
            batch = self.batches.build_dummy(data.fields, step, data.version)
            # Weight 0 changes no gradient; the other ranks wait for this one's part of each gather and reduction.
            self._algorithm.loss(trained.scores(batch), batch).total.backward()
        return total

    def _add_comparison(self, scores: Scores, batch: Batch) -> None:
        """Add a micro-batch, scored with the weights of the training step's start, to the comparison with acting."""
        if self._compare_acting:
            self._comparison.add({}, {"policy/recompute_kl": recompute_kl(scores, batch)})
