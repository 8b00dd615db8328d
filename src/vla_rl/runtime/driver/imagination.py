"""Training in imagination, as the driver sees it: fit the world model, measure it, and train the policy in it if it is
good enough. No frames come to the driver.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from attrs import evolve

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.run.selection import take_columns
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, ResetState
from vla_rl.runtime.comm.handles import Handle, by_reference
from vla_rl.runtime.comm.interfaces import WorldModelInterface, WorldModelRecordingInterface
from vla_rl.runtime.driver.assembler import RolloutBatch, joined, joined_advantages
from vla_rl.runtime.driver.collector import Collector
from vla_rl.runtime.driver.faults import FaultLog
from vla_rl.runtime.driver.imagination_quality import over_estimation, reason_to_pause, threshold_metrics
from vla_rl.runtime.driver.imagination_totals import ImaginationTotals
from vla_rl.runtime.driver.imagined_rollouts import ImaginedRollouts
from vla_rl.runtime.driver.sample_router import SampleRouter
from vla_rl.runtime.messages.world_model import FitResult

logger = logging.getLogger(__name__)
OnProgress = Callable[[str, int, int], object]


class Imagination(ABC):
    """Share of a training step that happens in a world model."""

    @property
    @abstractmethod
    def totals(self) -> dict[str, Any]:
        """Totals over the run, as `Runtime.imagination_totals`."""

    @abstractmethod
    def train(self, step: int, batch: RolloutBatch, version: int, on_progress: OnProgress) -> dict[str, float]:
        """Fit the world model to `step`'s real rollout, and roll out the policy in it. Return metrics.

        Args:
            version: newest version of the weights, which acts in imagination however far rollouts run ahead.
            on_progress: called when it begins.
        """

    @abstractmethod
    def with_imagined(self, real: RolloutBatch, advantages: Advantages) -> tuple[RolloutBatch, Advantages]:
        """Return what is trained on: the imagined samples and then the real ones, each with the advantages computed
        among their own kind.
        """

    @abstractmethod
    def all_rollouts(self, real: RolloutBatch) -> RolloutBatch:
        """Return all rollouts of the step, imagined and real."""

    @abstractmethod
    def finish(self, trained: bool) -> None:
        """Forget what was imagined in the step, which is over, and update the totals."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the world model and the totals to a checkpoint's trainer folder."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""


class NoImagination(Imagination):
    """Stand-in for a run without a world model."""

    @property
    def totals(self) -> dict[str, Any]:
        return {}

    def train(self, step: int, batch: RolloutBatch, version: int, on_progress: OnProgress) -> dict[str, float]:
        return {}

    def with_imagined(self, real: RolloutBatch, advantages: Advantages) -> tuple[RolloutBatch, Advantages]:
        return real, advantages

    def all_rollouts(self, real: RolloutBatch) -> RolloutBatch:
        return real

    def finish(self, trained: bool) -> None:
        pass

    def save(self, folder: Path) -> None:
        pass

    def load(self, folder: Path) -> None:
        pass


class ImaginationTrainer(Imagination):
    """Fits the world model after each real rollout, and decides whether the policy trains in it."""

    def __init__(
        self, collector: Collector, router: SampleRouter, spec: Spec, algorithm: Algorithm, fault_log: FaultLog
    ) -> None:
        """Create the trainer. `collector`: collector of the real rollouts."""
        assert spec.imagination is not None
        fleet = collector.fleet
        self.fleet = fleet
        self.collector = collector
        self.router = router
        self.algorithm = algorithm
        self.fault_log = fault_log
        self.section = spec.imagination
        self.rollouts = ImaginedRollouts(fleet, collector.restarts, spec, fault_log)
        self.world_model = Handle[WorldModelInterface](fleet, "imagination", fleet.sims[0].assignment)
        self.recordings = [
            Handle[WorldModelRecordingInterface](fleet, "recordings", sim.assignment) for sim in fleet.sims
        ]
        self._totals = ImaginationTotals()
        self._batch: RolloutBatch | None = None
        """Rollout that was imagined in the running step."""
        self._prepared: tuple[RolloutBatch, Advantages] | None = None
        """Part of it that is trained on, if any."""

    @property
    def totals(self) -> dict[str, Any]:
        return self._totals.with_tickets(self.rollouts.flow.ledger)

    def train(self, step: int, batch: RolloutBatch, version: int, on_progress: OnProgress) -> dict[str, float]:
        self.collector.wait_for_weights()
        on_progress("imagination", 0, 0)
        fit = self._fit(step, last_ticket=int(batch.numbers[-1]))
        metrics = {
            **fit.metrics,
            **threshold_metrics(fit),
            **over_estimation(self.fleet, self.section, step, fit, self.fault_log),
        }
        pause = reason_to_pause(self.section, step, fit, metrics)
        if not pause:
            states = self.fleet.get(self.world_model.call(WorldModelInterface.draw_starts, self.rollouts.next_groups))
            if states:
                metrics |= self._imagine(step, states, version, fit.version)
            else:
                pause = "there are no episodes to start from"
        if pause != self._totals.paused and step > self.section.warm_start:
            logger.warning("step %d: %s", step, f"imagination pauses: {pause}" if pause else "imagination goes on")
        metrics["imagination/paused"] = float(bool(pause))
        self._totals.record(metrics, fit.updates, pause)
        return metrics

    def with_imagined(self, real: RolloutBatch, advantages: Advantages) -> tuple[RolloutBatch, Advantages]:
        if self._prepared is None:
            return real, advantages
        imagined, imagined_advantages = self._prepared
        return joined([imagined, real]), joined_advantages(imagined_advantages, advantages)

    def all_rollouts(self, real: RolloutBatch) -> RolloutBatch:
        return real if self._batch is None else joined([self._batch, real])

    def finish(self, trained: bool) -> None:
        self.rollouts.finish(self._batch, "trained" if trained and self._prepared is not None else "discarded")
        self.fleet.get(self.world_model.call(WorldModelInterface.finish_step))
        self._batch = None
        self._prepared = None
        self._totals.finish()

    def save(self, folder: Path) -> None:
        self.fleet.get(self.world_model.call(WorldModelInterface.save, folder / "world_model.pt"))
        self._totals.save(folder, self.rollouts.flow.ledger)

    def load(self, folder: Path) -> None:
        self.rollouts.resume(self._totals.load(folder))
        self.fleet.get(self.world_model.call(WorldModelInterface.load, folder / "world_model.pt"))

    # -------------------------------------------------------------------------------------------------- inside

    def _fit(self, step: int, last_ticket: int) -> FitResult:
        """Fit the world model to the recorded episodes of tickets up to the last one of the step."""
        recorded = [
            by_reference(recordings.call(WorldModelRecordingInterface.take, last_ticket))
            for recordings in self.recordings
        ]
        return self.fleet.get(self.world_model.call(WorldModelInterface.fit, step, *recorded))

    def _imagine(self, step: int, states: list[ResetState], version: int, world_version: int) -> dict[str, float]:
        """Let the policy of `version` act in the world model of `world_version`, from these states, and prepare what is
        trained on. Return metrics.
        """
        start = perf_counter()
        batch = self.rollouts.collect(step, states, world_version)
        shaped = self.algorithm.shape_rewards(batch.rollout)
        keep = self.algorithm.select(shaped)
        self.rollouts.keep(shaped.groups[keep].unique().tolist())
        columns = keep.nonzero().flatten().numpy()
        metrics: dict[str, float] = {}
        if len(columns):
            prepared = self.router.prepare(version, batch, take_columns(shaped, columns), columns)
            advantages = self.algorithm.advantages(prepared.rollout)
            self._prepared = prepared, advantages
            metrics |= {f"imagination/{n.replace('/', '_')}": value for n, value in advantages.metrics.items()}
        self._batch = batch
        metrics |= self.rollouts.metrics(evolve(batch, rollout=shaped))
        metrics["imagination/kept"] = len(columns) / len(keep)
        metrics["time/imagination"] = perf_counter() - start
        return metrics
