"""A discrete-event simulation of the runtime: the plan's assignments, and the very `drive` of
`runtime/rollouts/lanes.py`, on workers that take virtual time.

A worker does one call after another, in the order in which they were issued, as a Ray actor does; so the end of a call
is known as soon as it is issued, and a reference is that time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from random import Random
from typing import Any

from attrs import define, evolve, field, frozen

from vla_rl.core.catalogue import load
from vla_rl.core.plan import Plan
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.assignments import Assignment, LaneSlice, assign
from vla_rl.runtime.planning.profile import Cost, Profile
from vla_rl.runtime.rollouts.lanes import Driving, Lane, Mode, Wait, drive

ROLES = ("sim", "policy", "learner")
GRADIENT_BYTES, MOMENT_BYTES = 4, 8
"""Of a trainable parameter: its gradient, and the two moments of AdamW."""
TICK = 1e-9
"""Seconds by which a virtual wait is longer than asked, so that rounding never makes it too short."""
MODE = Mode(purpose="action", greedy=False, keep=True)


@frozen(kw_only=True)
class Forecast:
    """What a plan is expected to do."""

    rollout: float
    update: float
    publish: float
    """Seconds of each phase, with what is offloaded by it."""
    iteration: float
    """Seconds from one update to the next."""
    env_steps: float
    """Of an iteration."""
    idle: dict[str, float]
    """Role -> share of its workers' time."""
    device_bytes: float | None
    """Weights, gradients and optimiser state on the fullest device; without activations. None: the model's size is not
    known."""
    host_bytes: float
    """Simulator rows of the fullest worker."""

    @property
    def throughput(self) -> float:
        """Environment steps a second."""
        return self.env_steps / self.iteration if self.iteration else float("inf")


@define
class _Server:
    """What does one thing at a time: a worker, or a device that several share."""

    free: float = 0.0


@frozen(kw_only=True)
class _Request:
    done: bool


@define(eq=False)
class _Reference:
    at: float
    value: Any = None


@define
class _Simulation:
    profile: Profile
    random: Random
    servers: dict[int, _Server]
    home: dict[int, Assignment]
    busy: dict[str, float] = field(factory=lambda: dict.fromkeys(ROLES, 0.0))
    now: float = 0.0

    def rollout(self, policies: Sequence[Assignment], rounds: int) -> None:
        """All rounds of all policies, each of which goes on as soon as what it waits for is there."""
        drivings = [self._rounds(policy, rounds) for policy in policies]
        begun = {i: next(driving, None) for i, driving in enumerate(drivings)}
        waiting: dict[int, Wait] = {i: wait for i, wait in begun.items() if wait is not None}
        while waiting:
            ends = [until for _, until in waiting.values() if until is not None]
            patience = max(0.0, min(ends) - self.now) if ends else None
            there = {id(r) for r in self._ready([r for needs, _ in waiting.values() for r in needs], patience)}
            for i, (needs, until) in list(waiting.items()):
                if not there.isdisjoint(map(id, needs)) or (until is not None and self.now >= until):
                    del waiting[i]
                    further = next(drivings[i], None)
                    if further is not None:
                        waiting[i] = further

    def _rounds(self, policy: Assignment, rounds: int) -> Driving:
        for r in range(rounds):
            if r:
                between = _Reference(self.now + self.profile.between)
                yield [between], None
            yield from self._round(policy)

    def _round(self, policy: Assignment) -> Driving:
        profile, local = self.profile, policy.local
        message, turn = (0.0, 0.0) if local else (profile.message, profile.turn)
        left: dict[int, int] = {}
        sizes = {lane.index: lane.rows for lane in policy.served}

        def work(assignment: Assignment, role: str, cost: Cost | None, rows: int, needs: Sequence[Any]) -> float:
            references = [r.at for r in needs if isinstance(r, _Reference)]
            server = self.servers[assignment.index]
            begin = max(self.now, server.free + turn, *(at + message for at in references))
            seconds = (
                0.0 if cost is None else cost.draw(self.random, cost.share(rows / cost.rows, assignment.slot.cpus))
            )
            server.free = begin + seconds
            self.busy[role] += seconds
            return server.free

        def simulator(lane: LaneSlice) -> Callable[..., Any]:
            def call(method: str, *arguments: Any) -> _Reference:
                first = method == "begin_train"
                if first:
                    lengths = profile.chunk_steps
                    left[lane.index] = self.random.choice(lengths) if isinstance(lengths, tuple) else lengths
                cost = profile.reset if first else profile.sim if left[lane.index] else None
                at = work(self.home[lane.index], "sim", cost, lane.rows, arguments)
                left[lane.index] = max(0, left[lane.index] - (not first))
                return _Reference(at + message, _Request(done=left[lane.index] == 0))

            return call

        def act(method: str, mode: Mode, lanes: tuple[int, ...], *requests: Any) -> _Reference:
            rows = sum(sizes[lane] for lane in lanes if left[lane])
            at = work(policy, "policy", profile.policy if rows else None, rows, requests)
            return _Reference(at, [_Reference(at) for _ in lanes])

        lanes = [Lane(slice=lane, sim=simulator(lane)) for lane in policy.served]
        window = evolve(policy.window, max_wait=None) if local else policy.window

        def begin(lane: Lane) -> tuple[Any, ...]:
            return "begin_train", lane.slice.index

        return drive(lanes, act, MODE, window, begin, self._value_of, self._ready, lambda: self.now)

    def _value_of(self, reference: _Reference) -> Any:
        self.now = max(self.now, reference.at)
        return reference.value

    def _ready(self, references: Sequence[_Reference], timeout: float | None) -> list[_Reference]:
        first = min(r.at for r in references)
        self.now = max(self.now, first if timeout is None else min(first, self.now + timeout + TICK))
        return [r for r in references if r.at <= self.now]


def forecast(
    plan: Plan,
    assignments: Sequence[Assignment],
    profile: Profile,
    *,
    rounds: int,
    chunk: int,
    row_memory: int = 0,
    repeats: int = 8,
) -> Forecast:
    """What the plan is expected to do with a job of these latencies.

    Args:
        rounds: of all rows in an iteration.
        chunk: actions of a chunk step.
        row_memory: host bytes of a simulator row.
        repeats: rollouts that are simulated, whose mean is taken.
    """
    home = {lane.index: assignment for assignment in assignments for lane in assignment.lanes}
    policies = [assignment for assignment in assignments if assignment.served]
    learners = [assignment for assignment in assignments if assignment.rank >= 0]
    simulation = _Simulation(profile, Random(0), _servers(assignments), home)
    for _ in range(repeats):
        simulation.rollout(policies, rounds)
    rollout = simulation.now / repeats
    learner, size = profile.learner, profile.learner.rows / len(learners)
    shares = [learner.share(size, assignment.slot.cpus) for assignment in learners]
    slowest = [max(learner.draw(simulation.random, share) for share in shares) for _ in range(repeats)]
    update = _mean(slowest)
    rollout += _moving(plan, assignments, profile, ("sim", "policy"))
    update += _moving(plan, assignments, profile, ("learner",))
    publish = profile.publish if any(assignment.rank < 0 for assignment in policies) else 0.0
    apart = all(not assignment.served and not assignment.lanes for assignment in learners)
    both = max(rollout, update + publish) if plan.max_lag and apart else rollout + update + publish
    iteration = both + profile.rest
    workers = {"sim": sum(bool(s.lanes) for s in assignments), "policy": len(policies), "learner": len(learners)}
    busy = {role: seconds / repeats for role, seconds in simulation.busy.items()} | {"learner": update * len(learners)}
    rows = sum(lane.rows for assignment in assignments for lane in assignment.lanes) * rounds
    mean = profile.chunk_steps if isinstance(profile.chunk_steps, int) else _mean(profile.chunk_steps)
    return Forecast(
        rollout=rollout,
        update=update,
        publish=publish,
        iteration=iteration,
        env_steps=rows * (mean * chunk if profile.env_steps is None else profile.env_steps),
        idle={r: 1 - busy[r] / (workers[r] * iteration) if iteration and workers[r] else 1.0 for r in ROLES},
        device_bytes=_device_bytes(plan, assignments, profile),
        host_bytes=max(sum(lane.rows for lane in assignment.lanes) for assignment in assignments) * row_memory,
    )


def expected(plan: Plan, spec: Spec, profile: Profile) -> Forecast:
    """What the plan is expected to do with a spec's job. Raises UserError where its lanes cannot share the rows.

    The local backend has one process whatever the plan says; this is what Ray would do.
    """
    return forecast(
        plan,
        assign(plan, spec.env.num_envs, one_process=False),
        profile,
        rounds=spec.rollout.rounds(spec.env.num_envs),
        chunk=spec.rollout.chunk,
        row_memory=load("env", spec.env.type, spec.plugins).row_memory,
    )


def _servers(assignments: Sequence[Assignment]) -> dict[int, _Server]:
    """A server for each worker; workers on one GPU take turns."""
    shared: dict[Hashable, _Server] = {}
    found = {}
    for assignment in assignments:
        on_gpu = assignment.slot.gpus > 0 and assignment.slot.index is not None
        key: Hashable = (assignment.slot.node, assignment.slot.index) if on_gpu else assignment.index
        found[assignment.index] = shared.setdefault(key, _Server())
    return found


def _moving(plan: Plan, assignments: Sequence[Assignment], profile: Profile, roles: Sequence[str]) -> float:
    """Seconds until the last worker has moved what it offloads of these roles, one after another."""
    moved = {role: profile.offload.get(role, 0.0) for role in roles if role in plan.offload}
    return max(sum(moved.get(role, 0.0) for role in assignment.slot.roles) for assignment in assignments)


def _device_bytes(plan: Plan, assignments: Sequence[Assignment], profile: Profile) -> float | None:
    """Of the fullest device, in the phase that needs more."""
    if profile.parameters is None:
        return None
    weights = profile.parameters * profile.weight_bytes
    trainable = profile.parameters if profile.trainable is None else profile.trainable
    state = trainable * (GRADIENT_BYTES + MOMENT_BYTES)
    phases: dict[Hashable, list[float]] = {}
    for assignment in assignments:
        acts, learns = bool(assignment.served), assignment.rank >= 0
        rollout = weights * (acts or (learns and "learner" not in plan.offload))
        rollout += state * (learns and "learner" not in plan.offload)
        update = weights * (learns or (acts and "policy" not in plan.offload)) + state * learns
        slot = assignment.slot
        key: Hashable = assignment.index if slot.index is None else (slot.node, slot.index)
        total = phases.setdefault(key, [0.0, 0.0])
        total[0] += rollout
        total[1] += update
    return max(max(both) for both in phases.values())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
