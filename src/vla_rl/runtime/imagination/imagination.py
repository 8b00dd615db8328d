"""Training in imagination, a part of the training step: fit the world model, measure it, and train the policy in it if
it is good enough. No frames come to the driver."""

from __future__ import annotations

import logging
from pathlib import Path
from time import perf_counter
from typing import Any

from attrs import evolve

from vla_rl.core.run.selection import select_trajectories, take_columns
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, ResetState
from vla_rl.runtime.checks.imagination import check_episodes
from vla_rl.runtime.comm.handles import Handle, by_reference
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, join_batches, joined_advantages
from vla_rl.runtime.driver.reports.trace import traced
from vla_rl.runtime.driver.training.part import StepContext, StepPart
from vla_rl.runtime.imagination.imagined_rollouts import ImaginedRollouts
from vla_rl.runtime.imagination.interfaces import (
    RECORDINGS,
    WORLD_MODEL,
    WorldModelInterface,
    WorldModelRecordingInterface,
)
from vla_rl.runtime.imagination.messages import ImaginationRoles
from vla_rl.runtime.imagination.quality import measure_over_estimation, reason_to_pause
from vla_rl.runtime.imagination.totals import ImaginationTotals
from vla_rl.runtime.messages.added_roles import AddedRoles

logger = logging.getLogger(__name__)


class Imagination(StepPart):
    """Fits the world model after each real rollout, and decides whether the policy trains in it."""

    name = "imagination"
    acts = True

    def __init__(self, spec: Spec, folder: Path) -> None:
        """Create the part. `folder`: run folder, where the world model's episodes are kept."""
        assert spec.imagination is not None
        self.spec = spec
        self.section = spec.imagination
        self.folder = folder.absolute()
        self._totals = ImaginationTotals()
        self._prepared: tuple[RolloutBatch, Advantages] | None = None
        """Part of the imagined rollout that is trained on, if any."""

    def added_roles(self, worker: int, lanes: dict[int, int]) -> AddedRoles:
        """Return the recordings of every worker; the world model is in the first, and imagines envs for all lanes."""
        settings = ImaginationRoles(folder=self.folder, lanes=None if worker else lanes)
        return AddedRoles(build="vla_rl.runtime.imagination.worker.imagined_envs:build_roles", settings=settings)

    def connect_to_run(self, context: StepContext) -> None:
        check_episodes(self.spec, context.algorithm, context.info)
        fleet = self.fleet = context.fleet
        self.collector = context.rollouts.collector
        self.router = context.router
        self.algorithm = context.algorithm
        self.fault_log = context.fault_log
        self.trace = context.trace
        self.real_rollouts = context.rollouts
        self.on_progress = context.on_progress
        self.rollouts = ImaginedRollouts(fleet, self.collector.restarts, self.spec, context.fault_log)
        self.world_model = Handle[WorldModelInterface](fleet, WORLD_MODEL, fleet.sims[0].assignment)
        self.recordings = [
            Handle[WorldModelRecordingInterface](fleet, RECORDINGS, sim.assignment) for sim in fleet.sims
        ]

    def totals(self) -> dict[str, Any]:
        return self._totals.with_tickets(self.rollouts.flow.ledger)

    @traced
    def follow_rollout(self, step: int) -> dict[str, float]:
        """Fit the world model to the step's real rollout, and roll out the policy in it. Return metrics.

        The newest version of the weights acts in imagination, however far rollouts run ahead.
        """
        batch = self.real_rollouts.current_batch
        self.collector.wait_for_weights()
        self.on_progress("imagination", 0, 0)
        last_ticket = int(batch.numbers[-1])
        recorded = [
            by_reference(recordings.call(WorldModelRecordingInterface.take_episodes, last_ticket))
            for recordings in self.recordings
        ]
        fit = self.fleet.get(self.world_model.call(WorldModelInterface.fit, step, *recorded))
        metrics = {
            **fit.metrics,
            **{f"imagination/threshold_{n.replace(' ', '_')}": float(met) for n, met in fit.thresholds_met.items()},
            **measure_over_estimation(self.fleet, self.section, step, fit, self.fault_log),
        }
        pause = reason_to_pause(self.section, step, fit, metrics)
        if not pause:
            states = self.fleet.get(self.world_model.call(WorldModelInterface.draw_starts, self.rollouts.next_groups))
            if states:
                metrics |= self._collect_imagined(step, states, fit.version)
            else:
                pause = "there are no episodes to start from"
        if pause != self._totals.pause_reason and step > self.section.warm_start:
            logger.warning("step %d: %s", step, f"imagination pauses: {pause}" if pause else "imagination continues")
        metrics["imagination/paused"] = float(bool(pause))
        self._totals.record_step(metrics, fit.updates, pause)
        return metrics

    def add_samples(self, samples: RolloutBatch, advantages: Advantages) -> tuple[RolloutBatch, Advantages]:
        """Return the imagined samples and then the real ones, each with the advantages computed among their own
        kind."""
        if self._prepared is None:
            return samples, advantages
        imagined, imagined_advantages = self._prepared
        return join_batches([imagined, samples]), joined_advantages(imagined_advantages, advantages)

    def finish_step(self, trained: bool) -> None:
        self.rollouts.end_step(self.batch, "trained" if trained and self._prepared is not None else "discarded")
        self.fleet.get(self.world_model.call(WorldModelInterface.finish_step))
        self.batch = None
        self._prepared = None
        self._totals.add_step()

    def save(self, folder: Path) -> None:
        self.fleet.get(self.world_model.call(WorldModelInterface.save, folder / "world_model.pt"))
        self._totals.save(folder, self.rollouts.flow.ledger)

    def load(self, folder: Path) -> None:
        self.rollouts.resume_tickets(self._totals.load(folder))
        self.fleet.get(self.world_model.call(WorldModelInterface.load, folder / "world_model.pt"))

    # -------------------------------------------------------------------------------------------------- inside

    def _collect_imagined(self, step: int, states: list[ResetState], world_version: int) -> dict[str, float]:
        """Let the policy act in the world model of this version, from these states, and prepare what is trained on.
        Return metrics."""
        start = perf_counter()
        batch = self.rollouts.collect_groups(step, states, world_version)
        shaped, keep = select_trajectories(batch.rollout, self.algorithm)
        self.rollouts.keep_groups(shaped.groups[keep].unique().tolist())
        columns = keep.nonzero().flatten().numpy()
        metrics: dict[str, float] = {}
        if len(columns):
            prepared = self.router.prepare_samples(batch, take_columns(shaped, columns), columns)
            advantages = self.algorithm.advantages(prepared.rollout)
            self._prepared = prepared, advantages
            metrics |= {f"imagination/{n.replace('/', '_')}": value for n, value in advantages.metrics.items()}
        self.batch = batch
        metrics |= self.rollouts.imagination_metrics(evolve(batch, rollout=shaped))
        metrics["imagination/kept"] = len(columns) / len(keep)
        metrics["time/imagination"] = perf_counter() - start
        return metrics
