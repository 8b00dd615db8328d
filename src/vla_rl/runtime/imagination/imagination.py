"""Training in imagination, a part of the training step: fit the world model, measure it, and train the policy in it if
it is good enough. No frames come to the driver."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import numpy as np
from attrs import evolve

from vla_rl.core.errors import CheckpointError
from vla_rl.core.run.flow import End, Flow, Ledger
from vla_rl.core.run.selection import select_trajectories, take_columns
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.sections import ImaginationSpec
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, ResetState
from vla_rl.runtime.checks.imagination import check_episodes
from vla_rl.runtime.comm.handles import Fleet, Handle, by_reference
from vla_rl.runtime.comm.interfaces import RolloutInterface
from vla_rl.runtime.driver.collecting import rollout_metrics
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, assemble_rollout, join_batches, joined_advantages
from vla_rl.runtime.driver.collecting.collector import Collector, Restarts
from vla_rl.runtime.driver.evaluation.evaluator import split_over_policies
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.driver.reports.trace import traced
from vla_rl.runtime.driver.training.part import StepContext, StepPart
from vla_rl.runtime.imagination.interfaces import (
    IMAGINED,
    MEASURING,
    RECORDINGS,
    TRAINING,
    WORLD_MODEL,
    FitResult,
    ImaginationRoles,
    WorldModelInterface,
    WorldModelRecordingInterface,
)
from vla_rl.runtime.messages.added_roles import AddedRoles
from vla_rl.runtime.messages.ids import IMAGINED_GROUPS
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.toolkit.json_files import read_record


class ImaginedRollouts:
    """Collects the imagined tickets of a step into a rollout batch: a second flow of tickets, in imagined envs."""

    def __init__(self, fleet: Fleet, restarts: Restarts, spec: Spec, fault_log: FaultLog) -> None:
        self.spec = spec
        self.fault_log = fault_log
        self.collector = Collector(fleet, restarts, runs_ahead=False, purpose=TRAINING, role=IMAGINED)
        self.resume_tickets(Ledger())

    @property
    def next_groups(self) -> list[int]:
        """Groups of the next rollout."""
        return list(range(self.flow.next_group, self.flow.next_group + self.flow.groups_per_step))

    def resume_tickets(self, ledger: Ledger) -> None:
        """Continue with the tickets after those that were counted."""
        self.flow = Flow(
            groups_per_step=RunShape.from_spec(self.spec).added_groups,
            steps=self.spec.train.steps,
            group_size=self.spec.rollout.group_size,
            ledger=ledger,
        )

    def collect_groups(self, step: int, states: Sequence[ResetState], world_version: int) -> RolloutBatch:
        """Roll out the next groups from these states, one for each group, in the world model of this version. Waits."""
        first_group = self.flow.next_group
        offset = IMAGINED_GROUPS * self.flow.group_size
        requests = [
            EpisodeRequest(state=states[ticket.group - first_group], number=offset + ticket.number, world=world_version)
            for ticket in self.flow.issue_tickets()
        ]
        self.collector.submit_tickets([requests])
        while self.flow.take_groups() is None:
            for number in self.collector.wait_for_tickets([offset + number for number in self.flow.tickets_needed]):
                self.flow.record_ticket(number - offset)
            self.fault_log.report_faults(self.collector.work.faults)
        trajectories = [self.collector.trajectories[request.number] for request in requests]
        return assemble_rollout(step, trajectories, self.flow.group_size)

    def keep_groups(self, groups: Sequence[int]) -> None:
        """Set the groups that the filters keep, by their numbers in the rollout batch."""
        self.flow.keep_groups([group - IMAGINED_GROUPS for group in groups])

    def imagination_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Return metrics under "imagination/": of episodes, and the oldest version of policy and world model in it."""
        rollout = batch.rollout
        episodes = rollout_metrics.episode_metrics(rollout.episodes)
        trajectories = [self.collector.trajectories[number][1].env_part for number in batch.numbers.tolist()]
        world_versions = [trajectory.world for trajectory in trajectories if trajectory.world is not None]
        return {
            **{f"imagination/{name.partition('/')[2]}": value for name, value in episodes.items()},
            "imagination/policy_version": float(rollout.versions[rollout.samples].min()),
            "imagination/world_model_version": float(min(world_versions)),
            "imagination/env_steps": float(self.collector.work.env_steps),
        }

    def end_step(self, batch: RolloutBatch | None, end: End) -> None:
        """End the step, whose rollout was `batch` (None: nothing was imagined) and ended in this way."""
        if batch is not None:
            self.collector.drop_tickets(batch.numbers.tolist())
            self.flow.finish_step(end)
        self.collector.reset_work()


FILE = "imagination.json"


class ImaginationTotals:
    """Sums over the run, up to the last finished step."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "imagined_steps": 0,
            "imagined_episodes": 0,
            "fit_updates": 0,
            "fit_seconds": 0.0,
            "paused_steps": 0,
            "paused": "",
        }
        self._of_step: dict[str, Any] = {}
        """Increments of the running step, added when it is over."""

    @property
    def pause_reason(self) -> str:
        """Reason why nothing was imagined in the last finished step; "" where something was."""
        reason: str = self.values["paused"]
        return reason

    def record_step(self, metrics: Mapping[str, float], fit_updates: int, paused: str) -> None:
        """Record the running step. `paused`: reason why nothing was imagined, or ""."""
        self._of_step = {
            "imagined_steps": int(metrics.get("imagination/env_steps", 0)),
            "imagined_episodes": int(metrics.get("imagination/episodes", 0)),
            "fit_updates": fit_updates,
            "fit_seconds": metrics["time/fit"],
            "paused_steps": int(bool(paused)),
            "paused": paused,
        }

    def add_step(self) -> None:
        """Add the step, which is over."""
        for name, value in self._of_step.items():
            self.values[name] = value if isinstance(value, str) else self.values[name] + value
        self._of_step = {}

    def with_tickets(self, ledger: Ledger) -> dict[str, Any]:
        """Return the totals, with the counts of imagined tickets, as plain data."""
        return {**self.values, "tickets": attrs.asdict(ledger)}

    def save(self, folder: Path, ledger: Ledger) -> None:
        (folder / FILE).write_text(json.dumps(self.with_tickets(ledger), indent=1), encoding="utf-8")

    def load(self, folder: Path) -> Ledger:
        """Restore what `save` wrote, and return the counts of imagined tickets."""
        self.values = dict(read_record(folder / FILE, CheckpointError).data)
        return Ledger(**self.values.pop("tickets"))


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
        """Fit the world model to the step's real rollout, and roll out the policy in it. Return metrics. The newest
        version of the weights acts in imagination, however far rollouts run ahead."""
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
        """Return the imagined samples and then the real ones, each with advantages of their own kind."""
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
        """Let the policy act in this version of the world model, from these states; prepare samples. Return metrics."""
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


NORMAL_QUANTILE = 1.96
"""Quantile of the normal distribution for a two-sided 95 % interval."""


def reason_to_pause(section: ImaginationSpec, step: int, fit: FitResult, metrics: Mapping[str, float]) -> str:
    """Return why nothing is imagined in this step; "" if something is. `metrics`: as of `measure_over_estimation`."""
    if step <= section.warm_start:
        return f"the first {section.warm_start} training steps are real only (imagination.warm_start)"
    thresholds = section.quality_thresholds
    if thresholds is None:
        return ""
    not_met = [name for name, met in fit.thresholds_met.items() if not met]
    if not_met:
        return f"the world model is not good enough yet on held-out episodes: {', '.join(not_met)}"
    low = metrics.get("imagination/over_estimation_low", math.inf)
    if low > thresholds.max_over_estimation:
        return (
            f"the policy succeeds more often in the world model than in the simulator, by at least {low:.2f} "
            f"(imagination.quality_thresholds.max_over_estimation: {thresholds.max_over_estimation:g})"
        )
    return ""


def measure_over_estimation(
    fleet: Fleet, section: ImaginationSpec, step: int, fit: FitResult, fault_log: FaultLog
) -> dict[str, float]:
    """Return how much more often imagined episodes succeed than real ones from equal frames, with 95 % interval."""
    if not fit.last_episodes:
        return {}
    first_number = IMAGINED_GROUPS + step * section.evaluated_episodes
    requests = [
        EpisodeRequest(state=state, number=first_number + i, world=fit.version)
        for i, (state, _) in enumerate(fit.last_episodes)
    ]
    reports = fleet.get_all(
        [
            fleet.rollouts[policy.worker_index].call(
                RolloutInterface.evaluate_in_background, share, MEASURING, IMAGINED
            )
            for policy, share in split_over_policies(fleet, requests)
        ]
    )
    for report in reports:
        fault_log.report_faults(report.faults)
    trajectories = [trajectory.env_part for report in reports for trajectory in report.collected]
    imagined = {trajectory.number: trajectory.episodes[0].success_once for trajectory in trajectories}
    pairs = zip(requests, fit.last_episodes, strict=True)
    differences = np.array([imagined[request.number] - real for request, (_, real) in pairs], np.float64)
    count = len(differences)
    mean = float(differences.mean())
    half = NORMAL_QUANTILE * float(differences.std(ddof=1)) / count**0.5 if count > 1 else math.inf
    interval = {"": mean, "_low": mean - half, "_high": mean + half}
    return {f"imagination/over_estimation{end}": value for end, value in interval.items() if math.isfinite(value)}
