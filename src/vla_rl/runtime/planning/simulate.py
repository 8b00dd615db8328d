"""Simulation of a run on virtual time: the run's own `Flow`, `distribute_tickets`, `TicketQueue` and `drive_lanes`,
with workers that take virtual seconds.

A worker runs one call after another, in the order in which they were issued, as a Ray actor does. So the end of a call
is known as soon as it is issued, and a reference is that time. The driver issues tickets, hands them out, waits for
those of a step, and then for its update; envs continue meanwhile with the tickets that they hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import chain, count
from random import Random
from typing import Any

from attrs import define, evolve, field, frozen

from vla_rl.core.run.flow import Flow
from vla_rl.core.types import ResetState
from vla_rl.runtime.messages.requests import EpisodeRequest, PolicyMode
from vla_rl.runtime.placement.assignments import Assignment, LaneSlice
from vla_rl.runtime.planning.job_model import JobModel, Server
from vla_rl.runtime.planning.profile import Profile
from vla_rl.runtime.scheduling.batching import Driving, Lane, drive_lanes
from vla_rl.runtime.scheduling.ticket_queue import TicketQueue, distribute_tickets

ROLES = ("sim", "policy", "learner")
TICK = 1e-9
"""Seconds added to a virtual wait, so that rounding never makes it too short."""
MODE = PolicyMode(purpose="action", greedy=False, keep=True)
STATE = ResetState(id=0, task="any")
ENDLESS = 10**9


@frozen(kw_only=True)
class Step:
    """Times of a training step."""

    rollout: float
    """Seconds that it waited for its tickets."""
    update: float
    """Seconds of its optimiser steps, including the waiting for busy workers."""
    end: float
    """Time at which the next step began."""
    busy: dict[str, float]
    """Role -> seconds that its workers have worked so far."""
    lag: int
    """Policy lag of its oldest chunk: training steps since the weights that chose it."""
    held: int
    """Largest number of tickets so far between their issue and the end of their step."""


@frozen(kw_only=True)
class _Request:
    """A virtual `StepRequest`."""

    positions: range
    ending: int
    waiting: int
    finished: Sequence[int]

    @property
    def done(self) -> bool:
        return not self.positions


@define(eq=False)
class _Reference:
    """Result of a virtual call, and the time at which it is there."""

    at: float
    value: Any = None


@define
class _Envs:
    """Envs of a lane and their tickets."""

    steps: int = 0
    active: int = 0
    ends: dict[int, list[int]] = field(factory=dict)
    """Chunk step of the lane -> tickets that end with it."""
    waiting: deque[int] = field(factory=deque)


@define
class Simulation:
    """Virtual driver and workers of a `JobModel`."""

    job: JobModel
    profile: Profile
    max_lag: int
    part_size: float = 0.0
    """Tickets that learners begin with while the step is incomplete; 0: learners wait for the step."""
    flow: Flow = field(init=False)
    steps: list[Step] = field(init=False, factory=list)
    now: float = field(init=False, default=0.0)
    _random: Random = field(init=False, factory=lambda: Random(0))
    _lengths: Random = field(init=False, factory=lambda: Random(1))
    _busy: dict[str, float] = field(init=False, factory=lambda: dict.fromkeys(ROLES, 0.0))
    _events: list[tuple[float, int, Callable[[], None]]] = field(init=False, factory=list)
    _order: count[int] = field(init=False, factory=count)
    _envs: dict[int, _Envs] = field(init=False, factory=dict)
    _queues: dict[int, TicketQueue] = field(init=False)
    _drives: dict[int, Driving] = field(init=False, factory=dict)
    _waiting: deque[deque[EpisodeRequest]] = field(init=False, factory=deque)
    """Tickets that no worker holds, in the batches in which they were issued."""
    _held_tickets: dict[int, int] = field(init=False)
    """Worker -> number of tickets that it holds."""
    _worker_of_ticket: dict[int, int] = field(init=False, factory=dict)
    _busy_until: dict[int, float] = field(init=False, factory=dict)
    """Sim worker with concurrent lanes -> time until which at least one of them works."""
    _version: dict[int, int] = field(init=False, factory=dict)
    """Ticket -> number of training steps that were over when it began."""
    _step_start: float = field(init=False, default=0.0)
    _training: bool = field(init=False, default=False)
    _begun_tickets: int = field(init=False, default=0)
    """Tickets of the step that learners have begun with."""
    _most_held: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.flow = Flow(groups_per_step=self.job.tickets, steps=ENDLESS, max_lag=self.max_lag)
        self._queues = {p.index: TicketQueue(p.served) for p in self.job.policy_workers}
        self._held_tickets = dict.fromkeys(self._queues, 0)

    def run_steps(self, steps: int) -> list[Step]:
        """Simulate this many training steps."""
        self._begin_step()
        while len(self.steps) < steps:
            at, _, action = heappop(self._events)
            self.now = max(self.now, at)
            action()
        return self.steps

    def _schedule_action(self, time: float, action: Callable[[], None]) -> None:
        heappush(self._events, (time, next(self._order), action))

    # -------------------------------------------------------------------------------------------------- the driver

    def _begin_step(self) -> None:
        self._step_start = self.now
        tickets = self.flow.issue_tickets()
        self._waiting.append(deque(EpisodeRequest(state=STATE, number=ticket.number) for ticket in tickets))
        self._most_held = max(self._most_held, self.flow.groups_held * self.job.fold)
        self._dispatch_tickets()
        self._begin_update()
        self._train_if_ready()

    def _receive_tickets(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.flow.record_ticket(number)
            self._held_tickets[self._worker_of_ticket.pop(number)] -= 1
        if not self._training:
            self._dispatch_tickets()
            self._begin_update()
            self._train_if_ready()

    def _dispatch_tickets(self) -> None:
        envs = {p.index: p.envs_served for p in self.job.policy_workers}
        runs_ahead = self.max_lag > 0
        assigned = distribute_tickets(
            self._waiting, held=self._held_tickets, envs=envs, policy_of_env={}, runs_ahead=runs_ahead
        )
        for worker, batches in assigned.items():
            for request in chain.from_iterable(batches):
                self._worker_of_ticket[request.number] = worker
                self._held_tickets[worker] += 1
            queue = self._queues[worker]
            if not queue.add_tickets(batches, queue.begun):
                queue.begin_rollout(batches)
                self._schedule_action(self.now, lambda worker=worker: self._advance_worker(worker))  # type: ignore[misc]

    def _begin_update(self) -> None:
        """Let learners begin with the tickets that are there, in the order of their numbers."""
        new = len(self.flow.groups_ready) - self._begun_tickets
        if self.part_size and new >= self.part_size:
            self._begun_tickets += new
            for learner in self.job.learners:
                self._run_update(learner, new / self.job.tickets)

    def _train_if_ready(self) -> None:
        """Begin the update once the step's tickets are there."""
        groups = self.flow.take_groups()
        if groups is None:
            return
        self._training = True
        rollout = self.now - self._step_start
        lag = self.flow.step - min(self._version.pop(number) for number in groups)
        left = 1 - self._begun_tickets / self.job.tickets
        self._begun_tickets = 0
        done = max(self._run_update(learner, left) for learner in self.job.learners)
        update = done - self.now
        profile = self.profile
        end = done + self.job.moving + profile.rest + (profile.publish if self.job.publishes else 0.0)

        def end_step() -> None:
            self.flow.finish_step()
            self._training = False
            self.steps.append(
                Step(rollout=rollout, update=update, end=end, busy=dict(self._busy), lag=lag, held=self._most_held)
            )
            self._begin_step()

        self._schedule_action(end, end_step)

    def _run_update(self, learner: Assignment, part: float) -> float:
        """Let a learner run this part of the step's update. Return the time at which it is done."""
        cost = self.profile.learner
        share = cost.load_share(cost.num_envs / len(self.job.learners), learner.slot.cpus)
        seconds = part * cost.draw_seconds(self._random, share)
        return self._add_work(self.job.servers[learner.index], "learner", seconds, self.now)

    def _add_work(self, server: Server, role: str, seconds: float, after: float, workers: int = 1) -> float:
        """Add a call to a server. Return the time at which it is done."""
        server.free = max(self.now, server.free, after) + seconds
        self._busy[role] += seconds * workers
        return server.free

    def _work_in_lane(self, host: Assignment, lane: Server, seconds: float, after: float) -> float:
        """Add a call to a lane that runs beside others; their worker is busy while one is. Return when it ends."""
        begin = max(self.now, lane.free, after)
        lane.free = begin + seconds
        worked = self._busy_until.get(host.index, 0.0)
        self._busy["sim"] += max(0.0, lane.free - max(begin, worked))
        self._busy_until[host.index] = max(worked, lane.free)
        return lane.free

    # -------------------------------------------------------------------------------------------------- the workers

    def _advance_worker(self, worker: int) -> None:
        """Advance a policy's worker until it has to wait."""
        queue = self._queues[worker]
        driving = self._drives.get(worker) or self._drive_lanes(worker)
        while (wait := next(driving, None)) is None:
            self._drives.pop(worker, None)
            if queue.end_if_empty():
                return
            driving = self._drive_lanes(worker)
        self._drives[worker] = driving
        references, until = wait
        first = min(reference.at for reference in references)
        self._schedule_action(
            first if until is None else min(first, until + TICK), lambda: self._advance_worker(worker)
        )

    def _drive_lanes(self, worker: int) -> Driving:
        """Return the driving of a worker's lanes, from their next tickets on."""
        policy = self.job.workers[worker]
        profile = self.profile
        message, turn = (0.0, 0.0) if policy.is_local else (profile.message, profile.turn)
        server = self.job.servers[worker]
        lanes = [
            Lane(slice=lane, sim=self._make_simulator(lane, self.job.workers[host], message, turn))
            for lane, host in zip(policy.served, policy.homes, strict=True)
        ]

        def run_inference(method: str, mode: PolicyMode, indices: tuple[int, ...], *requests: _Request) -> _Reference:
            envs = self.job.fold * sum(len(request.positions) for request in requests)
            cost = profile.policy
            share = cost.load_share(envs / cost.num_envs, policy.slot.cpus)
            at = self._add_work(
                server, "policy", cost.draw_seconds(self._random, share) if envs else 0.0, server.free + turn
            )
            if finished := [number for request in requests for number in request.finished]:
                self._schedule_action(at, lambda: self._receive_tickets(finished))
            return _Reference(at, [_Reference(at) for _ in requests])

        batching = evolve(policy.batching, max_wait_s=None) if policy.is_local else policy.batching
        tickets = self._queues[worker].take_tickets
        return drive_lanes(
            lanes,
            run_inference,
            MODE,
            batching,
            tickets,
            lambda reference: reference.value if isinstance(reference, _Reference) else reference,
            lambda references, timeout: [reference for reference in references if reference.at <= self.now],
            lambda: self.now,
        )

    def _make_simulator(
        self, lane: LaneSlice, host: Assignment, message: float, turn: float
    ) -> Callable[..., _Reference]:
        profile = self.profile
        width = self.job.widths.get(lane.index, 1)
        server = Server() if host.concurrent_lanes else self.job.servers[host.index]
        times = self.job.fold / width

        def call_simulator(method: str, index: int, actions: Any, tickets: Sequence[EpisodeRequest]) -> _Reference:
            envs = self._envs[index] = _Envs() if method == "begin" else self._envs[index]
            envs.waiting.extend(ticket.number for ticket in tickets)
            seconds, finished = 0.0, list[int]()
            if envs.active:
                share = profile.sim.load_share(envs.active * times / profile.sim.num_envs, host.slot.cpus)
                seconds = profile.sim.draw_seconds(self._random, share, envs.active)
                envs.steps += 1
                finished = envs.ends.pop(envs.steps, [])
                envs.active -= len(finished)
            if new := self._fill_envs(envs, lane.num_envs - envs.active):
                share = profile.reset.load_share(new * times / profile.reset.num_envs, host.slot.cpus)
                seconds += profile.reset.draw_seconds(self._random, share, new)
            after = actions.at + message if isinstance(actions, _Reference) else 0.0
            after = max(after, server.free + turn)
            if host.concurrent_lanes:
                at = self._work_in_lane(host, server, seconds, after)
            else:
                at = self._add_work(server, "sim", seconds, after, width)
            # Drawn lengths stand for episodes that end before their limit, of which no simulator knows beforehand.
            ending = 0 if isinstance(profile.chunk_steps, tuple) else len(envs.ends.get(envs.steps + 1, ()))
            waiting = len(envs.waiting)
            request = _Request(positions=range(envs.active), ending=ending, waiting=waiting, finished=finished)
            return _Reference(at + message, request)

        return call_simulator

    def _fill_envs(self, envs: _Envs, free: int) -> int:
        """Start waiting tickets in free envs. Return their number."""
        new = min(free, len(envs.waiting))
        for _ in range(new):
            number, lengths = envs.waiting.popleft(), self.profile.chunk_steps
            length = self._lengths.choice(lengths) if isinstance(lengths, tuple) else lengths
            envs.ends.setdefault(envs.steps + length, []).append(number)
            self._version[number] = self.flow.step
        envs.active += new
        return new
