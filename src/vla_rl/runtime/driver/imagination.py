"""Training in imagination, as the driver sees it: fit the world model, measure it, and train the policy in it if it is
good enough.

It is a second flow of tickets, in imagined envs. No frames come to the driver.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import numpy as np
import torch

from vla_rl.core.errors import CheckpointError
from vla_rl.core.fields import ADVANTAGES, read
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.run.flow import Flow, Ledger
from vla_rl.core.run.selection import take_columns
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.sections import ImaginationSpec
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, EnvInfo, Rollout
from vla_rl.runtime.checks.imagination import check_episodes
from vla_rl.runtime.comm.handles import Handle, by_reference
from vla_rl.runtime.comm.interfaces import HostInterface, WorldModelInterface, WorldModelRecordingInterface
from vla_rl.runtime.driver import figures
from vla_rl.runtime.driver.assembler import RolloutBatch, assemble, joined
from vla_rl.runtime.driver.collector import Collector
from vla_rl.runtime.driver.sample_router import SampleRouter
from vla_rl.runtime.messages.ids import IMAGINED_GROUPS
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.messages.world_model import FitResult
from vla_rl.runtime.run_folder.old_names import renamed
from vla_rl.toolkit.json_files import read_record

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], object]
Report = Callable[[list[str]], object]
TOTALS = "imagination.json"
"""File of a checkpoint with the totals of the run; `TOTALS_BEFORE` in earlier versions."""
TOTALS_BEFORE = "practice.json"


class ImaginationTrainer:
    """The imagined rollouts of a run, and the decision whether they are used."""

    def __init__(
        self, real: Collector, supply: SampleRouter, spec: Spec, algorithm: Algorithm, practises: bool
    ) -> None:
        """Create the trainer.

        Args:
            real: tickets of the simulators.
            practises: whether there is a world model; without one all methods do nothing.
        """
        fleet = real.fleet
        self.fleet, self.real, self.supply, self.spec, self.algorithm = fleet, real, supply, spec, algorithm
        self.section, self.practises = spec.imagination or ImaginationSpec(), practises
        self.tickets = Collector(fleet, real.restarts, ahead=False, purpose="imagination")
        self.role = Handle[WorldModelInterface](fleet, "imagination", fleet.sims[0].assignment)
        self.recordings = [
            Handle[WorldModelRecordingInterface](fleet, "recordings", sim.assignment) for sim in fleet.sims
        ]
        self.sums: dict[str, Any] = {
            "imagined_steps": 0,
            "imagined_episodes": 0,
            "fit_updates": 0,
            "fit_seconds": 0.0,
            "paused_steps": 0,
            "paused": "",
        }
        """Sums over the run, up to the last finished step."""
        self.flow = self._flow(Ledger())
        self.report: Report = lambda texts: None
        self._added: dict[str, Any] = {}
        """Increments of the sums, added when the step is over."""
        self._gathered: RolloutBatch | None = None
        """What was imagined in the running step ..."""
        self._chosen: RolloutBatch | None = None
        self._advantages: Advantages | None = None
        """... and the part of it that is trained on, if any."""

    def check(self, info: EnvInfo) -> None:
        """Raise SpecError where imagined episodes are cut off and nothing computes a bootstrap value."""
        if self.practises:
            check_episodes(self.spec, self.algorithm, info)

    # ----------------------------------------------------------------------------------------------- of a step

    def practise(
        self, step: int, rollout: RolloutBatch, version: int, progress: Progress, report: Report
    ) -> dict[str, float]:
        """Fit the world model to `step`'s real rollout, and roll out the policy in it. Return metrics.

        Args:
            version: newest version of the weights, which acts in imagination however far rollouts run ahead.
            progress: called when it begins.
            report: called with faults of imagined envs.
        """
        if not self.practises:
            return {}
        self.real.arrive()
        progress("imagination", 0, 0)
        self.report = report
        last = int(rollout.numbers[-1])
        ended = [
            by_reference(recordings.call(WorldModelRecordingInterface.take, last)) for recordings in self.recordings
        ]
        fitted = self.fleet.get(self.role.call(WorldModelInterface.fit, step, *ended))
        metrics = {**fitted.metrics, **_gates_metrics(fitted), **self._inflation(step, fitted)}
        why = self._why_not(step, fitted, metrics)
        if not why:
            why = self._imagine(step, version, fitted.version, metrics)
        if why != self.sums["paused"] and step > self.section.warm_start:
            logger.warning("step %d: %s", step, f"imagination pauses: {why}" if why else "imagination goes on")
        metrics["imagination/paused"] = float(bool(why))
        self._added = {
            "imagined_steps": int(metrics.get("imagination/env_steps", 0)),
            "imagined_episodes": int(metrics.get("imagination/episodes", 0)),
            "fit_updates": fitted.updates,
            "fit_seconds": metrics["time/fit"],
            "paused_steps": int(bool(why)),
            "paused": why,
        }
        return metrics

    def beside(self, chosen: RolloutBatch, advantages: Advantages) -> tuple[RolloutBatch, Advantages]:
        """Return what is trained on: the imagined samples and then the real ones, each with the advantages computed
        among their own kind.
        """
        if self._chosen is None or self._advantages is None:
            return chosen, advantages
        return joined([self._chosen, chosen]), concatenated(self._advantages, advantages)

    def whole(self, real: RolloutBatch) -> RolloutBatch:
        """Return all rollouts of the step, imagined and real."""
        return real if self._gathered is None else joined([self._gathered, real])

    def finish(self, trained: bool) -> None:
        """Forget what was imagined in the step, which is over, and update the sums."""
        if not self.practises:
            return
        if self._gathered is not None:
            self.tickets.release(self._gathered.numbers.tolist())
            self.flow.finish("trained" if trained and self._chosen is not None else "discarded")
        self.tickets.forget()
        self.fleet.get(self.role.call(WorldModelInterface.finish_step))
        self._gathered = self._chosen = self._advantages = None
        added, self._added = self._added, {}
        for name, value in added.items():
            self.sums[name] = value if isinstance(value, str) else self.sums[name] + value

    # --------------------------------------------------------------------------------------------- checkpoints

    @property
    def so_far(self) -> dict[str, Any]:
        """Return the sums over the run, as `Runtime.imagination_totals`."""
        if not self.practises:
            return {}
        return {**self.sums, "tickets": attrs.asdict(self.flow.ledger)}

    def save(self, folder: Path) -> None:
        if not self.practises:
            return
        self.fleet.get(self.role.call(WorldModelInterface.save, folder / "world_model.pt"))
        (folder / TOTALS).write_text(json.dumps(self.so_far, indent=1), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        if not self.practises:
            return
        file = folder / TOTALS
        if not file.exists() and (folder / TOTALS_BEFORE).exists():
            file = folder / TOTALS_BEFORE
        self.sums = renamed(read_record(file, CheckpointError).data, {"tickets.void": "tickets.discarded"})
        self.flow = self._flow(Ledger(**self.sums.pop("tickets")))
        self.fleet.get(self.role.call(WorldModelInterface.load, folder / "world_model.pt"))

    # -------------------------------------------------------------------------------------------------- inside

    def _flow(self, ledger: Ledger) -> Flow:
        rollout = self.spec.rollout
        groups = RunShape.of(self.spec).imagined_groups
        return Flow(per_step=groups, steps=self.spec.train.steps, group_size=rollout.group_size, ledger=ledger)

    def _why_not(self, step: int, fitted: FitResult, metrics: dict[str, float]) -> str:
        """Return the reason why nothing is imagined in this step; "" where something is."""
        section = self.section
        if step <= section.warm_start:
            return f"the first {section.warm_start} training steps are real only (imagination.warm_start)"
        if not section.quality_thresholds:
            return ""
        shut = [name for name, is_open in fitted.thresholds_met.items() if not is_open]
        if shut:
            return f"the world model is not good enough yet on held-out episodes: {', '.join(shut)}"
        low = metrics.get("imagination/over_estimation_low", math.inf)
        if low > section.max_over_estimation:
            return (
                f"the policy succeeds more often in the world model than in the simulator, by at least {low:.2f} "
                f"(imagination.max_over_estimation: {section.max_over_estimation:g})"
            )
        return ""

    def _inflation(self, step: int, fitted: FitResult) -> dict[str, float]:
        """Return how much more often the policy succeeds in the world model than in the last rollout from the same
        first frames, with the 95 % interval of the mean difference.
        """
        if not fitted.last_episodes:
            return {}
        numbers = [
            IMAGINED_GROUPS + step * self.section.evaluated_episodes + i for i in range(len(fitted.last_episodes))
        ]
        pairs = zip(fitted.last_episodes, numbers, strict=True)
        starts = [EpisodeRequest(state=state, number=number, world=fitted.version) for (state, _), number in pairs]
        rows = np.array([policy.assignment.envs_served for policy in self.fleet.policies])
        ends = (np.cumsum(rows) * len(starts) // rows.sum()).tolist()
        reports = self.fleet.get_all(
            [
                self.fleet.worker_of(policy).call(HostInterface.evaluate_imagined, starts[first:end])
                for policy, first, end in zip(self.fleet.policies, [0, *ends], ends, strict=False)
                if end > first
            ]
        )
        for report in reports:
            self.report(report.faults)
        won = {ticket.finished.number: ticket.finished.episodes[0].success_once for r in reports for ticket in r.played}
        gaps = np.array([won[n] - real for n, (_, real) in zip(numbers, fitted.last_episodes, strict=True)], np.float64)
        mean = float(gaps.mean())
        # 1.96: the normal quantile of a two-sided 95 % interval.
        half = 1.96 * float(gaps.std(ddof=1)) / len(gaps) ** 0.5 if len(gaps) > 1 else math.inf
        found = {"": mean, "_low": mean - half, "_high": mean + half}
        return {f"imagination/over_estimation{end}": value for end, value in found.items() if math.isfinite(value)}

    def _imagine(self, step: int, version: int, world: int, metrics: dict[str, float]) -> str:
        """Let the policy of `version` act in the world model of version `world`, and add to `metrics`. Return the
        reason why nothing came of it, or "".
        """
        before, rollout = perf_counter(), self.spec.rollout
        groups = range(self.flow.next, self.flow.next + self.flow.per_step)
        states = self.fleet.get(self.role.call(WorldModelInterface.draw_starts, list(groups)))
        if not states:
            return "there are no episodes to start from"
        first, offset = groups[0], IMAGINED_GROUPS * rollout.group_size
        starts = [
            EpisodeRequest(state=states[ticket.group - first], number=offset + ticket.number, world=world)
            for ticket in self.flow.issue()
        ]
        gathered = self._played(step, starts, offset)
        shaped = self.algorithm.shape_rewards(gathered.rollout)
        keep = self.algorithm.select(shaped)
        self.flow.keep((shaped.groups[keep].unique() - IMAGINED_GROUPS).tolist())
        columns = keep.nonzero().flatten().numpy()
        if len(columns):
            self._chosen = self.supply.prepare(version, gathered, take_columns(shaped, columns), columns)
            self._advantages = self.algorithm.advantages(self._chosen.rollout)
            said = self._advantages.metrics.items()
            metrics |= {f"imagination/{name.replace('/', '_')}": value for name, value in said}
        self._gathered = gathered
        metrics |= _renamed(shaped) | self._versions(gathered)
        metrics["imagination/env_steps"] = float(self.tickets.since.env_steps)
        metrics["imagination/kept"] = len(columns) / len(keep)
        metrics["time/imagination"] = perf_counter() - before
        return ""

    def _versions(self, gathered: RolloutBatch) -> dict[str, float]:
        """Return metrics: the oldest versions of policy and world model that made a chunk of it."""
        rollout, numbers = gathered.rollout, gathered.numbers.tolist()
        worlds = [self.tickets.played[number][1].finished.world for number in numbers]
        return {
            "imagination/policy_version": float(rollout.versions[rollout.samples].min()),
            "imagination/world_model_version": float(min(world for world in worlds if world is not None)),
        }

    def _played(self, step: int, starts: Sequence[EpisodeRequest], offset: int) -> RolloutBatch:
        self.tickets.play([starts])
        while self.flow.take() is None:
            for number in self.tickets.finished([offset + number for number in self.flow.needed]):
                self.flow.add(number - offset)
            self.report(self.tickets.since.faults)
        played = [self.tickets.played[start.number] for start in starts]
        return assemble(step, played, self.spec.rollout.group_size)


def concatenated(first: Advantages, second: Advantages) -> Advantages:
    """Join the advantages of two rollouts from one algorithm, column by column. Metrics are those of the second."""
    length = max(len(part.advantages) for part in (first, second))

    def beside(one: Any, other: Any) -> Any:
        if one is None or other is None:
            return None
        padded = [torch.cat((t, t.new_zeros(length - len(t), *t.shape[1:]))) for t in (one, other)]
        return torch.cat(padded, dim=1)

    changes = {field.name: beside(read(first, field), read(second, field)) for field in ADVANTAGES}
    (counts, value_counts), (others, other_values) = first.divisors, second.divisors
    changes |= {"counts": beside(counts, others), "value_counts": beside(value_counts, other_values)}
    extras = {name: beside(tensor, second.extras[name]) for name, tensor in first.extras.items()}
    return attrs.evolve(second, **changes, extras=extras)


def _renamed(rollout: Rollout) -> dict[str, float]:
    """Return the metrics of imagined episodes, under "imagination/"."""
    found = figures.of_episodes(rollout.episodes)
    return {f"imagination/{name.partition('/')[2]}": value for name, value in found.items()}


def _gates_metrics(fitted: FitResult) -> dict[str, float]:
    return {
        f"imagination/threshold_{name.replace(' ', '_')}": float(is_open)
        for name, is_open in fitted.thresholds_met.items()
    }
