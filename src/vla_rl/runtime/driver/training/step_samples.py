"""Samples of a training step, as the loop sees them: prepared for the learners, and freed."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from vla_rl.core.types import Array, Rollout
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, join_batches
from vla_rl.runtime.driver.collecting.rollouts import StepRollouts
from vla_rl.runtime.driver.reports.trace import Trace, traced
from vla_rl.runtime.driver.samples.sample_router import SampleRouter
from vla_rl.runtime.driver.training.part import StepPart
from vla_rl.runtime.driver.training.update import UpdateStrategy


class StepSamples:
    """Prepares what a step trains on, and frees it: the `Samples` of a runtime."""

    def __init__(
        self,
        rollouts: StepRollouts,
        router: SampleRouter,
        strategy: UpdateStrategy,
        parts: Sequence[StepPart],
        trace: Trace,
    ) -> None:
        self.rollouts = rollouts
        self.router = router
        self.strategy = strategy
        self.parts = parts
        self.trace = trace
        self.begin = strategy.begin_update
        self.prepared: RolloutBatch | None = None
        """What is trained on next."""
        self.prepare_seconds = 0.0

    @traced
    def prepare(self, selected: Rollout, columns: Array) -> Rollout:
        start = perf_counter()
        self.rollouts.collector.reset_work()
        prepared = self.strategy.prepare_batch(self.rollouts.current_batch, selected, columns)
        self.prepared = prepared
        self.prepare_seconds = perf_counter() - start
        return prepared.rollout

    def release(self, trained: bool) -> dict[str, float]:
        batch = self.rollouts.current_batch
        self.prepared = None
        self.strategy.finish_update(trained)
        self.rollouts.finish_rollout()
        collected = [part.batch for part in self.parts if part.batch is not None]
        metrics = self.router.free_unused(join_batches([*collected, batch]), trained)
        for part in self.parts:
            part.finish_step(trained)
        if not trained:
            self.rollouts.collector.reset_work()
        return metrics
