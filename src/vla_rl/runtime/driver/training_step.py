"""Training on the rollout of a step: real samples, replayed ones, and imagined ones."""

from __future__ import annotations

from time import perf_counter

from attrs import evolve

from vla_rl.core.types import Advantages, Array, Rollout
from vla_rl.runtime.driver.assembler import RolloutBatch
from vla_rl.runtime.driver.collector import Collector
from vla_rl.runtime.driver.imagination import Imagination
from vla_rl.runtime.driver.sample_router import SampleRouter
from vla_rl.runtime.driver.update import UpdateStrategy


class TrainingStep:
    """Prepares what a step trains on, updates the weights, and frees the samples."""

    def __init__(
        self, collector: Collector, router: SampleRouter, strategy: UpdateStrategy, imagination: Imagination
    ) -> None:
        self.collector = collector
        self.router = router
        self.strategy = strategy
        self.imagination = imagination
        self._prepared: RolloutBatch | None = None
        """What is trained on next."""
        self._prepare_seconds = 0.0

    def prepare(self, version: int, batch: RolloutBatch, selected: Rollout, columns: Array) -> Rollout:
        """Prepare what is trained on, and return it: replayed groups first, then the columns (indices) of the step's
        rollout that `selected` consists of.
        """
        start = perf_counter()
        self.collector.reset_work()
        prepared = self.strategy.prepare(version, batch, selected, columns)
        self._prepared = prepared
        self._prepare_seconds = perf_counter() - start
        return prepared.rollout

    def update(self, rollout: Rollout, advantages: Advantages) -> dict[str, float]:
        """Train on what was prepared; `rollout` replaces its trajectory records. Return metrics."""
        start = perf_counter()
        assert self._prepared is not None
        real = evolve(self._prepared, rollout=rollout)
        self._prepared = None
        samples, all_advantages = self.imagination.with_imagined(real, advantages)
        metrics = self.strategy.update(samples, all_advantages)
        seconds = self._prepare_seconds + perf_counter() - start
        return {**self.router.metrics, **metrics, "time/update": seconds}

    def finish(self, batch: RolloutBatch, trained: bool) -> dict[str, float]:
        """Free the samples of the step, whose rollout was `batch`. Return metrics."""
        metrics = self.router.finish(self.imagination.all_rollouts(batch), trained)
        self.imagination.finish(trained)
        if not trained:
            self.collector.reset_work()
        return metrics
