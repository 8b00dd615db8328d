"""The driver's half of a rollout: it gives tickets to policy workers, and holds the trajectories that come back."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, TypeVar

from attrs import define, field

from vla_rl.core.errors import WorkerDied
from vla_rl.runtime.comm.backend import Ref
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import HostInterface, PolicyInterface, RolloutInterface
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.messages.reports import RolloutReport, TrajectoryResult
from vla_rl.runtime.messages.requests import EpisodeRequest, StreamCursors
from vla_rl.runtime.scheduling.ticket_queue import Batches, distribute_tickets
from vla_rl.toolkit.waiting import register_work

T = TypeVar("T")


@define(eq=False, slots=False)
class Restarts:
    """Counts and performs the restarts of sim workers, whose tickets are rolled out again: with equal numbers, since
    randomness is keyed by ticket, episode and chunk. Policies and learners hold state that cannot be rebuilt, so a run
    that loses one of them resumes from its last checkpoint (`core/run/session.py`)."""

    fleet: Fleet
    limit: int
    """`runtime.restarts`."""
    fault_log: FaultLog
    """Log of each restart, which does not count towards its limit."""
    stateful: bool = False
    """Sim workers have further roles, whose state cannot be rebuilt either."""
    count: int = 0

    def run_with_restarts(self, roll_out: Callable[[], T]) -> T:
        """Call `roll_out` until no sim worker dies in it. Raises WorkerDied if another worker dies, or too many do."""
        while True:
            try:
                return roll_out()
            except WorkerDied as exc:
                self.fleet.connect_policies(self.restart_dead_workers(exc))

    def restart_dead_workers(self, error: WorkerDied) -> set[int]:
        """Start the dead workers again. Return them, not connected to their policies. A death meanwhile is another one.
        Raises the error where other workers than sim workers died, or too many."""
        fleet = self.fleet
        dead = [fleet.workers[index] for index in fleet.backend.dead_workers()]
        if not dead or self.stateful or any(worker.assignment.slot.roles != ("sim",) for worker in dead):
            raise error
        if self.count >= self.limit:
            error.add_note(f"sim workers were started again {self.count} times (runtime.restarts: {self.limit})")
            raise error
        self.count += 1
        workers = ", ".join(str(worker.worker_index) for worker in dead)
        num_lost = sum(lane.num_envs for worker in dead for lane in worker.assignment.lanes)
        self.fault_log.on_fault(
            f"sim worker {workers} died with {num_lost} unfinished episodes and is started again; they are re-run: "
            f"{str(error).splitlines()[0]}"
        )
        restarted = {worker.worker_index for worker in dead}
        fleet.backend.revive_workers(sorted(restarted))
        try:
            fleet.get_all([worker.call(HostInterface.start_sim) for worker in dead])
        except WorkerDied as exc:
            restarted |= self.restart_dead_workers(exc)
        return restarted


Trajectory = tuple[int, TrajectoryResult]
"""Worker of a ticket's policy, and the ticket's result."""


@define
class Collector:
    """Tickets of one purpose: queued, assigned to workers, and collected."""

    fleet: Fleet
    restarts: Restarts
    runs_ahead: bool
    """True where rollouts run ahead of training, so that reports are wanted while other tickets are still running."""
    reports_each: bool = False
    """True where each collected ticket is wanted at once (streaming update)."""
    purpose: str = "action"
    """Purpose of the `PolicyMode` in which tickets are rolled out."""
    role: str = "sim"
    """Role of the envs in which they are rolled out; those of another role than "sim" run in the background."""
    on_collected: Callable[[int, Sequence[TrajectoryResult]], None] | None = None
    """Callback with collected tickets and the worker of their policy, also while `wait_for` waits."""
    trajectories: dict[int, Trajectory] = field(factory=dict, init=False)
    """Ticket -> its trajectory; until `drop_tickets`."""
    work: RolloutReport = field(factory=RolloutReport, init=False)
    """Work done since `reset_work`; its `collected` stays empty."""
    publishing: list[Ref[Any]] = field(factory=list, init=False)
    """Calls that publish weights, for which tickets may wait."""
    wait_seconds: float = field(default=0.0, init=False)
    """Seconds that the driver waited since `reset_work`."""
    _cursors: StreamCursors = field(factory=StreamCursors, init=False)
    _queue: deque[deque[EpisodeRequest]] = field(factory=deque, init=False)
    """Tickets that no worker holds, in the batches in which they were issued."""
    _assigned: dict[int, dict[int, EpisodeRequest]] = field(init=False)
    """Worker -> tickets that it holds: running, or waiting there."""
    _policy_of_env: dict[int, int] = field(init=False)
    """Env (index in the run) -> worker of its policy."""
    _new: list[int] = field(factory=list, init=False)
    """Collected tickets that `wait_for_tickets` has not returned yet."""
    _rollouts: dict[int, Ref[RolloutReport]] = field(factory=dict, init=False)
    """Worker -> its running rollout."""
    _rollout_numbers: Counter[int] = field(factory=Counter, init=False)
    """Worker -> number of its running or last rollout. Calls of other groups overtake each other, so they name it."""
    _reports: dict[int, Ref[RolloutReport]] = field(factory=dict, init=False)
    """Worker -> report that its running rollout was asked for."""
    _failure: Exception | None = field(default=None, init=False)
    """What ended a rollout (a stop, or an error). It is raised when tickets are given or waited for, and not by
    `wait_for`: an update that is under way is finished first, since a checkpoint is between two updates."""

    def __attrs_post_init__(self) -> None:
        self._assigned = {policy.worker_index: {} for policy in self.fleet.policies}
        self._policy_of_env = {
            env: policy.worker_index
            for policy in self.fleet.policies
            for lane in policy.assignment.served
            for env in range(lane.first_env, lane.first_env + lane.num_envs)
        }

    def submit_tickets(self, batches: Sequence[Sequence[EpisodeRequest]]) -> None:
        """Have these tickets rolled out, earlier batches first. Does not wait."""
        start = perf_counter()
        self._queue.extend(deque(batch) for batch in batches if batch)
        self._raise_failure()
        self._dispatch_tickets()
        self.wait_seconds += perf_counter() - start  # with the local backend the rollout runs within this call

    def wait_for_tickets(self, needed: Collection[int]) -> list[int]:
        """Wait until some tickets are collected, if possible all needed ones. Return these, each once."""
        start = perf_counter()
        while not self._new:
            self._raise_failure()
            self._wait_and_dispatch(needed)
        self.wait_seconds += perf_counter() - start
        new = self._new
        self._new = []
        return new

    def step_metrics(self, consumed: int) -> dict[str, float]:
        """Return the time waited; where rollouts run ahead, also the tickets beyond the `consumed` ones."""
        metrics = {"time/rollout": self.wait_seconds}
        if self.runs_ahead:
            running = sum(map(len, (*self._assigned.values(), *self._queue)))
            metrics["rollout/ready_tickets"] = float(len(self.trajectories) - consumed)
            metrics["rollout/running_tickets"] = float(running)
        return metrics

    def wait_for(self, references: Sequence[Ref[T]]) -> list[T]:
        """Wait for results, as the fleet does; collected tickets are passed to `on_collected` meanwhile."""
        # Without a callback nothing has to happen meanwhile: the fleet waits for all at once.
        pending = list(references) if self.on_collected else []
        while pending and (self._rollouts or self._reports):
            self._wait_and_dispatch((), pending)
        return self.fleet.get_all(references)

    def wait_for_weights(self) -> None:
        """Wait until all policies have the version that was published last."""
        publishing = self.publishing
        self.publishing = []
        with register_work("publishing weights"):
            self.fleet.get_all(publishing)

    def reset_work(self) -> None:
        """Reset the work done and the time waited."""
        self.work = RolloutReport()
        self.wait_seconds = 0.0

    def drop_tickets(self, tickets: Sequence[int]) -> None:
        """Drop the trajectories of these tickets, here and in the policies' workers."""
        for number in tickets:
            del self.trajectories[number]
        self.fleet.get_all([policy.call(PolicyInterface.release_tickets, tickets) for policy in self.fleet.policies])

    # ------------------------------------------------------------------------------------------------------ inside

    def _wait_and_dispatch(self, needed: Collection[int], pending: list[Ref[Any]] | None = None) -> None:
        """Wait for news of tickets, or until one of `pending` is ready and removed. Give workers further tickets."""
        try:
            self._wait_for_news(needed, [] if pending is None else pending)
        except WorkerDied as exc:
            self._recover_from_death(exc)
        if self._failure is None:
            self._dispatch_tickets()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _dispatch_tickets(self) -> None:
        """Give waiting tickets to the workers that may hold more."""
        assigned = distribute_tickets(
            self._queue,
            held={worker: len(requests) for worker, requests in self._assigned.items()},
            envs={policy.worker_index: policy.assignment.envs_served for policy in self.fleet.policies},
            policy_of_env=self._policy_of_env,
            runs_ahead=self.runs_ahead,
        )
        for worker, batches in assigned.items():
            self._assign_tickets(worker, batches)

    def _assign_tickets(self, worker: int, batches: Batches) -> None:
        """Add tickets to a worker's running rollout, or begin one where it has ended."""
        self._assigned[worker] |= {request.number: request for batch in batches for request in batch}
        handle = self.fleet.rollouts[worker]
        if worker in self._rollouts:
            placed = self._with_cursors(batches)
            number = self._rollout_numbers[worker]
            if self.fleet.get(handle.call(RolloutInterface.add_tickets, placed, self.purpose, number)):
                return
            try:
                self._receive_report(self._rollouts, worker)
            except WorkerDied:  # the next wait meets it, too, and queues all tickets of this rollout again
                return
            if self._failure is not None:
                return
        placed = self._with_cursors(batches)
        self._rollout_numbers[worker] += 1
        if self.role == "sim":
            self._rollouts[worker] = handle.call(RolloutInterface.roll_out, placed)
        else:
            background = RolloutInterface.roll_out_in_background
            self._rollouts[worker] = handle.call(background, placed, self.purpose, self.role)

    def _with_cursors(self, batches: Batches) -> Batches:
        """Return the tickets, those of persistent streams with their position where it is known."""
        return [[self._cursors.with_position(request) for request in batch] for batch in batches]

    def _wait_for_news(self, needed: Collection[int], pending: list[Ref[Any]]) -> None:
        assert self._rollouts or self._reports, f"tickets {list(needed)[:5]} are waited for, and no worker rolls out"
        self._request_reports(frozenset(needed))
        expected = [*self._rollouts.values(), *self._reports.values(), *self.publishing, *pending]
        ready = {id(reference) for reference in self.fleet.backend.wait_for_any(expected)}
        for calls in (self.publishing, pending):
            for reference in [reference for reference in calls if id(reference) in ready]:
                calls.remove(reference)
                self.fleet.get(reference)
        for reports in (self._reports, self._rollouts):
            for worker in [worker for worker, reference in reports.items() if id(reference) in ready]:
                self._receive_report(reports, worker)

    def _request_reports(self, needed: frozenset[int]) -> None:
        """Ask running rollouts for a report where it is of use before their end."""
        early = bool(self._queue or self.on_collected or self.reports_each)
        for worker in self._rollouts:
            needed_there = [number for number in self._assigned[worker] if number in needed]
            if worker not in self._reports and (early or (self.runs_ahead and needed_there)):
                self._reports[worker] = self._ask_for_report(worker, needed_there, early)

    def _ask_for_report(self, worker: int, needed: Sequence[int], early: bool) -> Ref[RolloutReport]:
        """Call `wait_for_report` of a worker's running or last rollout."""
        handle = self.fleet.rollouts[worker]
        number = self._rollout_numbers[worker]
        return handle.call(RolloutInterface.wait_for_report, needed, early, self.purpose, number)

    def _receive_report(self, reports: dict[int, Ref[RolloutReport]], worker: int) -> None:
        """Store the report of a worker and remove its call; keep what ended the rollout instead. Raises WorkerDied."""
        try:
            report = self.fleet.get(reports[worker])
        except WorkerDied:
            raise
        except Exception as exc:
            self._failure = self._failure or exc
            report = RolloutReport()
        del reports[worker]
        self._store_report(worker, report)

    def _store_report(self, worker: int, report: RolloutReport) -> None:
        """Store the trajectories of a report."""
        for trajectory in report.collected:
            number = trajectory.env_part.number
            self.trajectories[number] = worker, trajectory
            self._cursors.note_ticket(trajectory.env_part)
            del self._assigned[worker][number]
            self._new.append(number)
        if report.collected and self.on_collected:
            self.on_collected(worker, report.collected)
        self.work.add_work(report)

    def _recover_from_death(self, error: WorkerDied) -> None:
        """Restart dead sim workers, and queue the tickets of their policies. Raises the error for other workers."""
        dead = self.restarts.restart_dead_workers(error)
        for policy in self.fleet.policies:
            worker = policy.worker_index
            if worker not in self._rollouts or not dead & set(policy.assignment.sim_workers):
                continue
            for reports in (self._rollouts, self._reports):
                if worker in reports:
                    with suppress(WorkerDied):
                        self._receive_report(reports, worker)
                    reports.pop(worker, None)
            self._store_report(worker, self.fleet.get(self._ask_for_report(worker, (), False)))
            lost_tickets = self._assigned[worker]
            self._assigned[worker] = {}
            self.fleet.get(policy.call(PolicyInterface.release_tickets, list(lost_tickets)))
            self._queue.appendleft(deque(lost_tickets.values()))
        self.fleet.connect_policies(dead)
