"""Update of the weights with the samples of a step, which learners hold: it splits them into the optimiser steps of
each rank, and merges the ranks' metrics.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from vla_rl.core.spec.spec import Spec
from vla_rl.core.trainers import UpdateMetrics
from vla_rl.core.types import Advantages, Array, Rollout
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, SampleIndex, batch_fields, find_samples
from vla_rl.runtime.driver.collecting.collector import Collector
from vla_rl.runtime.driver.samples.minibatches import RankShard, split_into_minibatches
from vla_rl.runtime.driver.samples.sample_router import SampleRouter
from vla_rl.toolkit.algorithms.statistics import read_all

logger = logging.getLogger(__name__)


class UpdateStrategy(ABC):
    """When learners get a step's samples, and what each optimiser step consists of."""

    @abstractmethod
    def begin_update(self, step: int, tickets: Sequence[int]) -> None:
        """Let learners begin with these collected tickets, the first of all that the step consumes, if they can. Does
        not wait.
        """

    @abstractmethod
    def prepare_batch(self, batch: RolloutBatch, selected: Rollout, columns: Array) -> RolloutBatch:
        """Return what is trained on, moved to the learners: replayed groups first, then the columns (indices) of a
        step's rollout that `selected` consists of.
        """

    @abstractmethod
    def run_update(self, prepared: RolloutBatch, advantages: Advantages) -> dict[str, float]:
        """Train on all samples of `prepared`. Return metrics."""

    @abstractmethod
    def finish_update(self, trained: bool) -> None:
        """End the step. `trained`: False where it had nothing to train on."""


class StepUpdate(UpdateStrategy):
    """Update that begins when all samples of the step are there."""

    def __init__(self, spec: Spec, collector: Collector, router: SampleRouter) -> None:
        self.spec = spec
        self.fleet = collector.fleet
        self.collector = collector
        self.router = router

    def begin_update(self, step: int, tickets: Sequence[int]) -> None:
        """Do nothing: the step is incomplete."""

    def prepare_batch(self, batch: RolloutBatch, selected: Rollout, columns: Array) -> RolloutBatch:
        return self.router.prepare_samples(batch, selected, columns)

    def run_update(self, prepared: RolloutBatch, advantages: Advantages) -> dict[str, float]:
        samples = find_samples(prepared.rollout, np.arange(len(prepared.numbers)), prepared)
        fields = batch_fields(prepared.rollout, advantages, samples)
        assert prepared.ranks is not None
        ranks = prepared.ranks[samples.steps, samples.columns]
        step = prepared.rollout.step
        shards = self._split_shards(step, samples, ranks, fields)
        pending = []
        for learner, shard in zip(self.fleet.learners, shards, strict=True):
            shard_fields = {name: None if array is None else array[shard.samples] for name, array in fields.items()}
            references = samples.workers[shard.samples], samples.sample_ids[shard.samples]
            pending.append(learner.call(LearnerInterface.update, step, references, shard_fields, shard.steps))
        results = self.collector.wait_for(pending)
        log_warnings(step, results)
        return update_metrics(len(samples.steps), len(shards[0].steps), results)

    def finish_update(self, trained: bool) -> None:
        """Do nothing: nothing is kept from one step to the next."""

    def _split_shards(
        self, step: int, samples: SampleIndex, ranks: Array, fields: dict[str, Array | None]
    ) -> list[RankShard]:
        """Return the shard of each rank (`ranks`: int64 [S], rank of each sample): first the samples of the policy in
        the rank's worker, then the others by worker, each in the order of the sample ids.
        """
        train = self.spec.train
        learner_workers = np.array([learner.worker_index for learner in self.fleet.learners])
        source = np.where(samples.workers == learner_workers[ranks], 0, samples.workers + 1)
        order = np.empty(len(ranks), np.int64)
        order[np.lexsort((samples.sample_ids, source))] = np.arange(len(ranks))
        return split_into_minibatches(
            ranks,
            order,
            fields,
            world=len(self.fleet.learners),
            seed=self.spec.seed,
            step=step,
            epochs=train.epochs,
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
        )


def log_warnings(step: int, results: Sequence[UpdateMetrics]) -> None:
    """Log the warnings of all ranks, equal ones once."""
    for text in dict.fromkeys(text for result in results for text in result.warnings):
        logger.warning("warning: step %d: %s", step, text)


def update_metrics(samples: int, optimizer_steps: int, results: Sequence[UpdateMetrics]) -> dict[str, float]:
    """Return the metrics of an update. `results`: what `LearnerInterface.update` returned for each rank."""
    return {
        "update/samples": float(samples),
        "update/optimizer_steps": float(optimizer_steps),
        **_merge_metrics(results),
        "time/learner": max(result.seconds for result in results),
    }


def _merge_metrics(results: Sequence[UpdateMetrics]) -> dict[str, float]:
    """Merge the metrics of all ranks: sums are added, of maxima the largest counts, statistics are read."""
    metrics: dict[str, float] = {}
    for result in results:
        for name, value in result.sums.items():
            metrics[name] = metrics.get(name, 0.0) + value
        for name, value in result.maxima.items():
            metrics[name] = max(metrics.get(name, value), value)
    return metrics | read_all([result.statistics for result in results])
