"""The policy update of one rank: forward and backward passes over its samples, and optimiser steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Array, Batch, Scores
from vla_rl.runtime.messages.learning import UNNORMALISED, OptimizerStep
from vla_rl.runtime.messages.model_inputs import ModelInputs
from vla_rl.runtime.workers.learner import optimizer
from vla_rl.runtime.workers.learner.gradient_accumulator import GradientAccumulator, MetricAccumulator
from vla_rl.runtime.workers.learner.micro_batches import InputRows, MicroBatches, SampleFields
from vla_rl.runtime.workers.learner.trained_model import TrainedModel
from vla_rl.toolkit.algorithms.statistics import Mean


class PolicyUpdate:
    """Updates of the policy by an algorithm's loss."""

    def __init__(
        self, trained: TrainedModel, algorithm: Algorithm, heartbeat: Callable[[], None], compare_acting: bool = False
    ) -> None:
        """Create the updates.

        Args:
            heartbeat: called before each pass.
            compare_acting: report `policy/recompute_kl`.
        """
        self.batches = MicroBatches(trained, algorithm)
        self._trained = trained
        self._algorithm = algorithm
        self._heartbeat = heartbeat
        self._compare_acting = compare_acting
        self.restart()

    def restart(self) -> None:
        """Begin a training step without samples, and free the samples of the last one."""
        train = self._trained.train
        self._comparison = MetricAccumulator()
        """Comparison of recomputed log-probs with those of acting, over the samples of the first optimiser step."""
        self._accumulator = GradientAccumulator(
            self._trained.parameters, self._algorithm.loss, keep_samples=train.epochs > 1
        )

    def update(
        self, step: int, version: int, inputs: InputRows | None, fields: SampleFields, steps: Sequence[OptimizerStep]
    ) -> dict[str, Any]:
        """Make all optimiser steps of one training step.

        Args:
            version: version of the weights before the update.
            inputs, fields: this rank's samples in one order.

        Returns: "sums", "maxima" and "statistics" of the algorithm's metrics (sums are means over the optimiser steps
        once they are added over ranks) and "seconds".
        """
        before = perf_counter()
        seconds_before = 0.0
        trained = self._trained
        metrics = MetricAccumulator({"loss/total": torch.zeros((), device=trained.device)})
        norms: list[torch.Tensor] = []
        with trained.released():
            optimizer.set_rates(trained.optimizer, trained.train, trained.train.factor(step))
            if any(optimizer_step.accumulated for optimizer_step in steps):
                seconds_before = self._accumulator.seconds
                inputs, fields, steps = self._accumulator.epochs(steps)
            for index, optimizer_step in enumerate(steps):
                if optimizer_step.accumulated:
                    loss = self._accumulator.normalise(optimizer_step, metrics, len(steps))
                else:
                    loss = self._passes(version, inputs, fields, optimizer_step, metrics, len(steps), first=index == 0)
                critic_only = step <= trained.train.critic_warmup_steps
                norms.append(trained.optimizer_step(f"step {step}", loss, critic_only))
            metrics.add({}, self._comparison.statistics)
            self._accumulator.check_linear()
            trained.check_finite()
            self.restart()
        metrics.maxima["policy/grad_norm"] = torch.stack([torch.zeros((), device=trained.device), *norms]).max()
        on_host = metrics.on_host()
        return {
            "sums": {name: float(value) for name, value in on_host.sums.items()},
            "maxima": {name: float(value) for name, value in on_host.maxima.items()},
            "statistics": on_host.statistics,
            "seconds": seconds_before + perf_counter() - before,
        }

    def forward_backward(
        self,
        version: int,
        inputs: ModelInputs | None,
        fields: SampleFields,
        micro_batches: Sequence[Array],
        passes: int,
        first: bool,
    ) -> None:
        """Run the passes of a part of a training step's samples, before the rest is there. `update` makes the optimiser
        step.

        Args:
            version, inputs, fields: as in `update`.
            micro_batches, passes: as in `OptimizerStep`.
            first: this is the training step's first part.
        """
        self._trained.strategy.release()  # the policy acts again after `update`
        if first:
            self._trained.optimizer.zero_grad(set_to_none=True)
            self.restart()
        part = self._accumulator.part(inputs, fields, micro_batches, passes)
        with part, self._trained.adapters_cast_once():
            for batch in self.batches.each(inputs, fields, micro_batches, UNNORMALISED, version):
                self._heartbeat()
                scores = self._trained.scores(batch)
                self._compare(scores, batch)
                self._accumulator.add(scores, batch)
            for _ in range(self._trained.dummy_passes(passes, len(micro_batches))):
                self._heartbeat()
                batch = self.batches.dummy(fields, UNNORMALISED, version)
                self._accumulator.add(self._trained.scores(batch), batch, counts=False)

    def _passes(
        self,
        version: int,
        inputs: InputRows | None,
        fields: SampleFields,
        step: OptimizerStep,
        metrics: MetricAccumulator,
        count: int,
        first: bool,
    ) -> torch.Tensor:
        """Run the passes of all micro-batches of one of `count` optimiser steps, whether it is the first. Return the
        loss.
        """
        trained = self._trained
        trained.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=trained.device)
        with trained.adapters_cast_once():
            for batch in self.batches.each(inputs, fields, step.micro_batches, step, version):
                self._heartbeat()
                scores = trained.scores(batch)
                if first:
                    self._compare(scores, batch)
                loss = self._algorithm.loss(scores, batch)
                loss.total.backward()
                total = total + loss.total.detach()
                metrics.add_sums(loss.metrics, count)
                metrics.add(loss.maxima, loss.statistics)
        metrics.add_sums({"loss/total": total}, count)
        for _ in range(trained.dummy_passes(step.passes, len(step.micro_batches))):
            self._heartbeat()
            batch = self.batches.dummy(fields, step, version)
            self._algorithm.loss(trained.scores(batch), batch).total.backward()
        return total

    def _compare(self, scores: Scores, batch: Batch) -> None:
        """Add a micro-batch, scored with the weights of the training step's start, to the comparison with acting."""
        if self._compare_acting:
            self._comparison.add({}, {"policy/recompute_kl": recompute_kl(scores, batch)})


def recompute_kl(scores: Scores, batch: Batch) -> Mean:
    """Estimate KL(acting || recomputed) in nats per token (k3 of Schulman 2020), over the samples that the learner's
    own weights sampled. It is 0 where acting and learning compute the same.
    """
    log_ratio = (scores.log_probs.detach() - batch.log_probs).double()
    same_weights = batch.valid & (batch.lag == 0)[:, None]
    return Mean.of(torch.expm1(log_ratio) - log_ratio, same_weights[..., None].expand_as(log_ratio))
