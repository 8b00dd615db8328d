"""Rollouts in the simulators: from tickets to episode requests, and from trajectories to a batch and metrics."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
from attrs import define, evolve, field

from vla_rl.core.catalogue import load
from vla_rl.core.errors import CheckpointError
from vla_rl.core.plan import Plan
from vla_rl.core.reset_states import draw_state
from vla_rl.core.run.flow import Ticket
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.sections import WeightedTasks
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo, Episode, Requirements, ResetState, Rollout
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import HostInterface, LearnerInterface
from vla_rl.runtime.driver.collecting import rollout_metrics
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, assemble_rollout
from vla_rl.runtime.driver.collecting.collector import Collector
from vla_rl.runtime.driver.collecting.recordings import RecordingSchedule, with_recordings
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.driver.reports.trace import Trace, traced
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest
from vla_rl.runtime.planning.memory import check_memory, trajectory_bytes
from vla_rl.toolkit.json_files import read_record


@define(eq=False, slots=False)
class SampleMemory:
    """Sizes of the model and of samples, which workers measure when first asked."""

    fleet: Fleet
    spec: Spec
    plan: Plan
    info: EnvInfo
    _checked: bool = False

    @cached_property
    def sample_bytes(self) -> int:
        """Bytes of a chunk step's sample, as learners hold it."""
        return self.fleet.get(self.fleet.learners[0].call(LearnerInterface.sample_bytes))

    def check_samples_fit(self) -> None:
        """Raise UserError where the samples that learners may hold at once do not fit into memory, or those of a step
        have no room on their way there. Checks once, before the first ticket."""
        if not self._checked:
            check_memory(self.spec, self.plan, self.fleet.backend.cluster_resources(), self.info, self.sample_bytes)
            if self.fleet.remote_policies:
                tickets = RunShape.from_spec(self.spec).tickets_per_step
                self.fleet.backend.check_store(tickets * trajectory_bytes(self.spec, self.info, self.sample_bytes))
            self._checked = True

    def measure_sizes(self) -> dict[str, float]:
        """Return the size of the model, and with learners of the longest trajectory, as `planning.profile.Profile`."""
        fleet = self.fleet
        sizes = fleet.get(fleet.worker_of(fleet.policies[0]).call(HostInterface.model_size))
        if fleet.learners:
            sizes = {**sizes, "trajectory_bytes": trajectory_bytes(self.spec, self.info, self.sample_bytes)}
        return sizes


@define
class EnvStreams:
    """Persistent env streams (auto_reset) in the driver: which ticket follows which, and what a checkpoint stores. The
    driver knows positions after tickets that came back, the policy's worker after those it finished."""

    issued: dict[int, int] = field(factory=dict)
    """Env -> its last ticket."""
    consumed: dict[int, EpisodeRequest] = field(factory=dict)
    """Env -> position of its stream after the last ticket that was trained on."""

    def issue_ticket(self, request: EpisodeRequest) -> EpisodeRequest:
        """Issue a ticket as the next of its env's stream, and return it with where it starts: after the ticket before
        it, after a checkpoint if it is the first since a resume, or at the state of `request`."""
        env = request.env_id
        assert env is not None
        previous = self.issued.get(env)
        self.issued[env] = request.number
        if previous is not None:
            return evolve(request, follows=previous)
        cursor = self.consumed.get(env)
        if cursor is None:
            return evolve(request, actions=np.zeros((0, 0, 0), np.float32))
        return request.continued_from(cursor)

    def consume_trajectory(self, trajectory: EnvTrajectory) -> None:
        """Record that a step has trained on this trajectory."""
        cursor = trajectory.after
        if cursor is not None:
            assert cursor.env_id is not None
            self.consumed[cursor.env_id] = cursor

    def save(self, file: Path) -> None:
        """Write the positions of all streams, if any."""
        if not self.consumed:
            return
        envs = sorted(self.consumed)
        cursors = [self.consumed[env] for env in envs]
        empty = np.zeros((0, 0, 0), np.float32)
        actions = [empty if cursor.actions is None else cursor.actions for cursor in cursors]
        shape = max((chunks.shape[1:] for chunks in actions if len(chunks)), default=(0, 0))
        np.savez_compressed(
            file,
            rows=np.array(envs, np.int64),
            states=np.array([cursor.state.id for cursor in cursors], np.int64),
            episodes=np.array([cursor.episode for cursor in cursors], np.int64),
            paid=np.array([cursor.return_so_far for cursor in cursors], np.float64),
            lengths=np.array([len(chunks) for chunks in actions], np.int64),
            actions=np.concatenate([np.zeros((0, *shape), np.float32), *(chunks for chunks in actions if len(chunks))]),
        )

    def load(self, file: Path, states: Mapping[int, ResetState]) -> None:
        """Restore what `save` wrote, if anything. A stream whose state is not in `states` (by id) begins again."""
        if not file.is_file():
            return
        with np.load(file) as arrays:
            ends = np.cumsum(arrays["lengths"])
            actions = np.split(arrays["actions"], ends[:-1]) if len(ends) else []
            columns = [arrays[name].tolist() for name in ("rows", "states", "episodes", "paid")]
            for env, state, episode, return_so_far, chunks in zip(*columns, actions, strict=True):
                if state not in states:  # `env.exclude_states` names it since
                    continue
                self.consumed[env] = EpisodeRequest(
                    state=states[state],
                    number=-1,
                    episode=episode,
                    env_id=env,
                    actions=chunks,
                    return_so_far=return_so_far,
                )


logger = logging.getLogger(__name__)


@define(eq=False, slots=False)
class StepRollouts:
    """Requests the episodes of tickets and assembles their trajectories into a step's rollout: a run's `Rollouts`."""

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
        """Tickets rolled out together, before later ones: one an env with streaming updates, else those of a step."""
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
        for number in tickets:
            self.requests.streams.consume_trajectory(self.collector.trajectories[number][1].env_part)
        self.collector.drop_tickets(tickets)
        self._batch = None
        self.faults = 0


class EpisodeRequests:
    """Turns tickets into episode requests: reset state, version of the weights and previous ticket."""

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
        whole_episodes = spec.rollout.auto_reset is None
        env = ticket.number % shape.envs
        group = ticket.group if whole_episodes else env // shape.group_size
        request = EpisodeRequest(
            state=draw_state(self.states, spec.seed, group, weights=weights),
            number=ticket.number,
            env_id=None if whole_episodes else env,
            record=whole_episodes and self.keep_frames,
            recorded=whole_episodes and self.recording_schedule.is_next_recorded(steps_before + 1),
            weights=None if whole_episodes else weights,
            version=pinned,
            least=version,
            expert_share=share,
        )
        return request if whole_episodes else self.streams.issue_ticket(request)

    def record_outcomes(self, step: int, episodes: Sequence[Episode], last_ticket: int) -> dict[str, float]:
        """Record the outcomes of `step`'s rollout for the weights of tasks. Return metrics."""
        if self.task_weighting is None:
            return {}
        self.task_weighting.record_step_outcomes(step, episodes)
        weights = self.task_weighting.group_weights(step, last_ticket // self.shape.group_size)
        return {f"sampling/weight/{task}": weight for task, weight in weights.items()}

    def save(self, folder: Path) -> None:
        self.streams.save(folder / "streams.npz")
        if self.task_weighting:
            self.task_weighting.save(folder / "tasks.json")

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.streams.load(folder / "streams.npz", {state.id: state for state in self.states})
        if self.task_weighting:
            self.task_weighting.load(folder / "tasks.json")


class TaskWeighting:
    """Dynamic weighted resampling (AcceRL, eq. 11): weight: failures of a task's last `window` outcomes + `smoothing`.
    Outcomes count from the next step on, so a step that is repeated after a stop finds the weights that it had."""

    def __init__(self, tasks: Iterable[str], window: int, smoothing: float, ahead: int = 0):
        """Create the weights. `ahead`: training steps that tickets are issued ahead (`asynchrony.max_lag`)."""
        self.smoothing = smoothing
        self.failed: dict[str, deque[bool]] = {task: deque(maxlen=window) for task in dict.fromkeys(tasks)}
        self.newest: tuple[int, list[tuple[str, bool]]] = (0, [])
        self.issued: deque[tuple[int, dict[str, float]]] = deque(maxlen=ahead + 2)
        """Weights in use from each group on, (first group, weights)."""
        self.next = 0
        """First group that was never issued."""

    def group_weights(self, step: int, group: int) -> dict[str, float]:
        """Return task -> weight for a group that is issued while `step` runs; one issued again keeps its own."""
        if group >= self.next:
            self.next = group + 1
            current = self._current_weights(step)
            if not self.issued or current != self.issued[-1][1]:
                self.issued.append((group, current))
        return next(weights for first, weights in reversed(self.issued) if first <= group)

    def _current_weights(self, step: int) -> dict[str, float]:
        recorded, outcomes = self.newest
        if recorded < step:
            for task, failed in outcomes:
                self.failed[task].append(failed)
            self.newest = (step, [])
        return {task: sum(failed) + self.smoothing for task, failed in self.failed.items()}

    def record_step_outcomes(self, step: int, episodes: Iterable[Episode]) -> None:
        """Record the outcomes of `step`'s rollout, in the order of the tickets, whatever the placement."""
        ordered = sorted(episodes, key=lambda e: (e.number, e.episode))
        self.newest = (step, [(e.task, not e.success_once) for e in ordered])

    def save(self, file: Path) -> None:
        failed = {task: list(outcomes) for task, outcomes in self.failed.items()}
        state = {"failed": failed, "newest": self.newest, "issued": list(self.issued), "next": self.next}
        file.write_text(json.dumps(state), encoding="utf-8")

    def load(self, file: Path) -> None:
        """Restore what `save` wrote; without a file (a run that sampled uniformly) the outcomes stay empty."""
        if not file.is_file():
            return
        state = read_record(file, CheckpointError).data
        for task, failed in self.failed.items():
            failed.extend(state["failed"].get(task, ()))
        self.issued.extend((first, weights) for first, weights in state["issued"])
        self.next = state["next"]
        step, outcomes = state["newest"]
        self.newest = (step, [(task, failed) for task, failed in outcomes if task in self.failed])
