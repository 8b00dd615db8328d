"""Rollouts in the simulators: from tickets to requests for episodes, and from trajectories to a rollout batch and its
metrics."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path

from attrs import define

from vla_rl.core.catalogue import load
from vla_rl.core.reset_states import draw_state
from vla_rl.core.run.flow import Ticket
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.sections import WeightedTasks
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo, Episode, Requirements, ResetState, Rollout
from vla_rl.runtime.driver.collecting import rollout_metrics
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, assemble_rollout
from vla_rl.runtime.driver.collecting.collector import Collector
from vla_rl.runtime.driver.collecting.env_streams import EnvStreams
from vla_rl.runtime.driver.collecting.recordings import RecordingSchedule, with_recordings
from vla_rl.runtime.driver.collecting.sample_memory import SampleMemory
from vla_rl.runtime.driver.collecting.task_weights import TaskWeighting
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.driver.reports.trace import Trace, traced
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest

logger = logging.getLogger(__name__)


@define(eq=False, slots=False)
class StepRollouts:
    """Requests the episodes of tickets, and assembles their trajectories into the rollout of a step: the `Rollouts` of
    a runtime."""

    collector: Collector
    requests: EpisodeRequests
    memory: SampleMemory
    spec: Spec
    info: EnvInfo
    fault_log: FaultLog
    trace: Trace

    def __attrs_post_init__(self) -> None:
        self.fleet = self.collector.fleet
        self.shape = RunShape.from_spec(self.spec)
        self.tickets_per_batch = self.shape.envs if self.shape.streaming else self.shape.tickets_per_step
        """Tickets that are rolled out together, before later ones: one for each env with streaming updates, else those
        of a step."""
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
        rollout = with_recordings(self._batch, self.fleet, self.spec)
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


class EpisodeRequests:
    """Turns tickets into episode requests: the reset state, the version of the weights and the previous ticket from
    which each ticket starts."""

    def __init__(self, spec: Spec, states: Sequence[ResetState], needs: Requirements):
        """Create the requests' source. `needs`: requirements of the algorithm."""
        self.spec = spec
        self.states = states
        self.keep_frames = needs.frames
        self.shape = RunShape.from_spec(spec)
        self.streams = EnvStreams()
        self.recording_schedule = RecordingSchedule(spec)
        self._expert_share = load("trainer", spec.trainer.type, spec.plugins).expert_share
        self.task_weighting: TaskWeighting | None = None
        """Outcomes of each task, for `rollout.task_sampling: {type: weighted}`; None otherwise."""
        sampling = spec.rollout.task_sampling
        if isinstance(sampling, WeightedTasks):
            tasks = [state.task for state in states]
            self.task_weighting = TaskWeighting(tasks, sampling.window, sampling.smoothing, self.shape.max_lag)

    def build_request(self, ticket: Ticket, step: int, version: int) -> EpisodeRequest:
        """Return the request for a ticket that was issued while `step` ran and `version` was the newest."""
        spec = self.spec
        shape = self.shape
        weights = self.task_weighting.group_weights(step, ticket.group) if self.task_weighting else None
        steps_before = ticket.group // shape.groups_per_step if shape.has_overlap else step - 1
        share = 0.0 if self._expert_share is None else self._expert_share(spec.trainer.config, steps_before + 1)
        pinned = max(0, steps_before - shape.pinned_lag) if shape.pinned_lag else -1
        if spec.rollout.auto_reset is None:
            return EpisodeRequest(
                state=draw_state(self.states, spec.seed, ticket.group, weights=weights),
                number=ticket.number,
                record=self.keep_frames,
                recorded=self.recording_schedule.is_next_recorded(steps_before + 1),
                version=pinned,
                least=version,
                expert_share=share,
            )
        env = ticket.number % shape.envs
        request = EpisodeRequest(
            state=draw_state(self.states, spec.seed, env // shape.group_size, weights=weights),
            number=ticket.number,
            env_id=env,
            weights=weights,
            version=pinned,
            least=version,
            expert_share=share,
        )
        return self.streams.issue_ticket(request)

    def record_outcomes(self, step: int, episodes: Sequence[Episode], last_ticket: int) -> dict[str, float]:
        """Record the outcomes of `step`'s rollout for the weights of tasks. Return metrics."""
        if self.task_weighting is None:
            return {}
        self.task_weighting.record_step_outcomes(step, episodes)
        weights = self.task_weighting.group_weights(step, last_ticket // self.shape.group_size)
        return {f"sampling/weight/{task}": weight for task, weight in weights.items()}

    def consume_trajectories(self, trajectories: Sequence[EnvTrajectory]) -> None:
        """Record that a step has trained on these trajectories, in the order of their tickets."""
        for trajectory in trajectories:
            self.streams.consume_trajectory(trajectory)

    def save(self, folder: Path) -> None:
        self.streams.save(folder / "streams.npz")
        if self.task_weighting:
            self.task_weighting.save(folder / "tasks.json")

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.streams.load(folder / "streams.npz", {state.id: state for state in self.states})
        if self.task_weighting:
            self.task_weighting.load(folder / "tasks.json")
