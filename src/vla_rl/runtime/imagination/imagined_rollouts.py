"""Rollouts in the world model: a second flow of tickets, in imagined envs."""

from __future__ import annotations

from collections.abc import Sequence

from vla_rl.core.run.flow import End, Flow, Ledger
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import ResetState
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.driver.collecting import rollout_metrics
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, assemble_rollout
from vla_rl.runtime.driver.collecting.collector import Collector
from vla_rl.runtime.driver.collecting.restarts import Restarts
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.imagination.interfaces import IMAGINED, TRAINING
from vla_rl.runtime.messages.ids import IMAGINED_GROUPS
from vla_rl.runtime.messages.requests import EpisodeRequest


class ImaginedRollouts:
    """Collects the imagined tickets of a step into a rollout batch."""

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
        """Return metrics under "imagination/": of the episodes, and the oldest versions of policy and world model that
        made a chunk."""
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
