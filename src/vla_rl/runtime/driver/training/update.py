"""Samples of a training step: prepared on learners, split into each rank's optimiser steps, trained on, freed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np
from attrs import define, field, frozen

from vla_rl.core.randomness import generator
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.spec.spec import Spec
from vla_rl.core.trainers import OptimizerStep, UpdateMetrics
from vla_rl.core.types import Advantages, Array, Rollout
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, all_samples, join_batches
from vla_rl.runtime.driver.collecting.rollouts import StepRollouts
from vla_rl.runtime.driver.reports.trace import Trace, traced
from vla_rl.runtime.driver.samples.sample_router import SampleRouter
from vla_rl.runtime.driver.training.part import StepPart
from vla_rl.toolkit.algorithms.statistics import read_all

logger = logging.getLogger(__name__)


@define(eq=False, slots=False)
class StepUpdate:
    """The `Samples` of a runtime: prepares what a step trains on, updates when all of it is there, and frees it."""

    spec: Spec
    rollouts: StepRollouts
    router: SampleRouter
    parts: Sequence[StepPart]
    trace: Trace
    prepared: RolloutBatch | None = field(default=None, init=False)
    """What is trained on next."""
    prepare_seconds: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self.collector = self.rollouts.collector
        self.fleet = self.rollouts.fleet

    def begin(self, step: int, tickets: Sequence[int]) -> None:
        """Do nothing: the step is incomplete."""

    @traced
    def prepare(self, selected: Rollout, columns: Array) -> Rollout:
        start = perf_counter()
        self.collector.reset_work()
        self.prepared = self.prepare_batch(self.rollouts.current_batch, selected, columns)
        self.prepare_seconds = perf_counter() - start
        return self.prepared.rollout

    def release(self, trained: bool) -> dict[str, float]:
        batch = self.rollouts.current_batch
        self.prepared = None
        self.finish_update(trained)
        self.rollouts.finish_rollout()
        collected = [part.batch for part in self.parts if part.batch is not None]
        metrics = self.router.free_unused(join_batches([*collected, batch]), trained)
        for part in self.parts:
            part.finish_step(trained)
        if not trained:
            self.collector.reset_work()
        return metrics

    def prepare_batch(self, batch: RolloutBatch, selected: Rollout, columns: Array) -> RolloutBatch:
        """Return what is trained on, moved to the learners: replayed groups first, then the columns (indices) of a
        step's rollout that `selected` consists of."""
        return self.router.prepare_samples(batch, selected, columns)

    def run_update(self, prepared: RolloutBatch, advantages: Advantages) -> dict[str, float]:
        """Train on all samples of `prepared`. Return metrics."""
        samples = all_samples(prepared, advantages)
        assert prepared.ranks is not None
        ranks = prepared.ranks[samples.steps, samples.columns]
        step = prepared.rollout.step
        learner_workers = np.array([learner.worker_index for learner in self.fleet.learners])
        # A rank's own order: samples of the policy in its worker first, the others by worker, then by sample id.
        source = np.where(samples.workers == learner_workers[ranks], 0, samples.workers + 1)
        order = np.empty(len(ranks), np.int64)
        order[np.lexsort((samples.sample_ids, source))] = np.arange(len(ranks))
        train = self.spec.train
        shards = split_into_minibatches(
            ranks,
            order,
            samples.fields,
            world=len(learner_workers),
            seed=self.spec.seed,
            step=step,
            train=train,
        )
        pending = []
        for learner, shard in zip(self.fleet.learners, shards, strict=True):
            part = samples.take(shard.samples)
            pending.append(learner.call(LearnerInterface.update, step, part.refs, part.fields, shard.steps))
        results = self.collector.wait_for(pending)
        log_warnings(step, results)
        return update_metrics(len(samples), len(shards[0].steps), results)

    def finish_update(self, trained: bool) -> None:
        """Forget the update. `trained`: False where the step had nothing to train on. Nothing is kept here."""


def log_warnings(step: int, results: Sequence[UpdateMetrics]) -> None:
    """Log the warnings of all ranks, equal ones once."""
    for text in dict.fromkeys(text for result in results for text in result.warnings):
        logger.warning("warning: step %d: %s", step, text)


def update_metrics(samples: int, optimizer_steps: int, results: Sequence[UpdateMetrics]) -> dict[str, float]:
    """Return metrics of what `LearnerInterface.update` returned for each rank: sums, maxima, and statistics as read."""
    metrics: dict[str, float] = {}
    for result in results:
        for name, value in result.sums.items():
            metrics[name] = metrics.get(name, 0.0) + value
        for name, value in result.maxima.items():
            metrics[name] = max(metrics.get(name, value), value)
    return {
        "update/samples": float(samples),
        "update/optimizer_steps": float(optimizer_steps),
        **metrics,
        **read_all([result.statistics for result in results]),
        "time/learner": max(result.seconds for result in results),
    }


@frozen(kw_only=True, eq=False)
class RankShard:
    """Shard of one learner rank: its samples in the rank's own order, and its micro-batches of each optimiser step."""

    samples: Array
    """Indices into all samples, int64."""
    steps: list[OptimizerStep] = field(factory=list)


def split_into_minibatches(
    ranks: Array,
    order: Array,
    fields: Mapping[str, Array | None],
    *,
    world: int,
    seed: int,
    step: int,
    train: TrainSpec,
) -> list[RankShard]:
    """Split the samples into the optimiser steps of one iteration.

    Which sample is in which step depends on (seed, step, epoch) and never on ranks. Divisors count all ranks of a step.

    Args:
        ranks: int64 [S], learner rank of each sample.
        order: int64 [S], sort key of a sample within its rank.
        fields: batch fields of the samples, [S, ...], with their counts.
    """
    count, micro_batch = len(ranks), train.micro_batch
    optimizer_steps = train.optimizer_steps(count)
    size = train.global_batch or count / optimizer_steps
    counts = fields["counts"]
    value_counts = fields["value_counts"]
    assert counts is not None and value_counts is not None
    shards = [
        RankShard(samples=np.lexsort((order, ranks != rank))[: int((ranks == rank).sum())]) for rank in range(world)
    ]
    position = np.zeros(count, np.int64)
    for shard in shards:
        position[shard.samples] = np.arange(len(shard.samples))
    for epoch in range(train.epochs):
        shuffled = generator(seed, "mini-batches", step, epoch).permutation(count)
        for index in range(optimizer_steps):
            members = shuffled[round(index * size) : round((index + 1) * size)]
            # In lockstep the others make up the difference to the rank with most samples by dummy batches.
            passes = -(-int(np.bincount(ranks[members]).max()) // micro_batch)
            for rank, shard in enumerate(shards):
                shard_members = position[members[ranks[members] == rank]]
                shard.steps.append(
                    OptimizerStep(
                        micro_batches=tuple(
                            shard_members[i : i + micro_batch] for i in range(0, len(shard_members), micro_batch)
                        ),
                        passes=passes,
                        # Where no action counts, all weights are 0: the loss is 0 then, and not 0 / 0.
                        divisor=max(float(counts[members].sum()), 1e-8),
                        value_divisor=max(float(value_counts[members].sum()), 1e-8),
                    )
                )
    return shards
