"""Rollouts in the simulators: from tickets to a rollout batch and its metrics."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from itertools import groupby

from vla_rl.core.run.flow import Ticket
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo, Rollout
from vla_rl.runtime.driver.collecting import rollout_metrics
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, assemble_rollout
from vla_rl.runtime.driver.collecting.collector import Collector
from vla_rl.runtime.driver.collecting.episode_requests import EpisodeRequests
from vla_rl.runtime.driver.collecting.recordings import with_recordings
from vla_rl.runtime.driver.collecting.sample_memory import SampleMemory
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.driver.reports.trace import Trace, traced

logger = logging.getLogger(__name__)


class StepRollouts:
    """Requests the episodes of tickets, and assembles their trajectories into the rollout of a step: the `Rollouts` of
    a runtime.
    """

    def __init__(
        self,
        collector: Collector,
        requests: EpisodeRequests,
        memory: SampleMemory,
        spec: Spec,
        info: EnvInfo,
        fault_log: FaultLog,
        trace: Trace,
    ) -> None:
        self.collector = collector
        self.fleet = collector.fleet
        self.requests = requests
        self.memory = memory
        self.spec = spec
        self.info = info
        self.fault_log = fault_log
        self.trace = trace
        self.shape = RunShape.from_spec(spec)
        self.tickets_per_batch = self.shape.envs if self.shape.streaming else self.shape.tickets_per_step
        """Tickets that are rolled out together, before later ones: one for each env with streaming updates, else those
        of a step.
        """
        self.faults = 0
        """Faults of envs in the running step."""
        self._batch: RolloutBatch | None = None
        self._warned = False
        """A warning of actions outside of the bounds has been logged."""

    @property
    def current_batch(self) -> RolloutBatch:
        """Rollout batch of the running step, once it is assembled."""
        assert self._batch is not None
        return self._batch

    @traced
    def issue(self, step: int, tickets: Sequence[Ticket]) -> None:
        self.memory.check_samples_fit()
        version = self.fleet.version
        batches = groupby(tickets, lambda ticket: ticket.number // self.tickets_per_batch)
        self.collector.submit_tickets(
            [[self.requests.build_request(ticket, step, version) for ticket in batch] for _, batch in batches]
        )

    @traced
    def wait(self, needed: Collection[int]) -> list[int]:
        collected = self.collector.wait_for_tickets(needed)
        faults = self.collector.work.faults
        self.faults += len(faults)
        self.fault_log.report_faults(faults)
        return collected

    @traced
    def assemble(self, step: int, tickets: Sequence[int]) -> tuple[Rollout, dict[str, float]]:
        collector = self.collector
        trajectories = [collector.trajectories[number] for number in tickets]
        self._batch = assemble_rollout(step, trajectories, self.shape.group_size)
        self.trace.ticket_chunk_steps = [len(trajectory.env_part.record["valid"]) for _, trajectory in trajectories]
        rollout = with_recordings(self._batch.rollout, collector.fleet, self.spec, tickets)
        outside, text = rollout_metrics.outside_bounds(rollout, self.info)
        if text and not self._warned:
            logger.warning("warning: step %d: %s", step, text)
            self._warned = True
        metrics = {
            **rollout_metrics.episode_metrics(rollout.episodes),
            **outside,
            **rollout_metrics.work_metrics(collector.work),
            **(rollout_metrics.lag_metrics(rollout, self.fleet.version) if collector.runs_ahead else {}),
            **collector.step_metrics(len(tickets)),
            **self.requests.record_outcomes(step, rollout.episodes, tickets[-1]),
            "faults/envs": float(self.faults),
        }
        return rollout, metrics

    def finish_rollout(self) -> None:
        """End the step: drop its trajectories, and reset its count of faults."""
        tickets = self.current_batch.numbers.tolist()
        self.requests.consume_trajectories([self.collector.trajectories[number][1].env_part for number in tickets])
        self.collector.drop_tickets(tickets)
        self._batch = None
        self.faults = 0
