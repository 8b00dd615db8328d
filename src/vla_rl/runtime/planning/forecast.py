"""Forecast of a job under a plan: seconds, idle shares, memory, and the max_lag that is worthwhile."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import fmean

from attrs import evolve, frozen

from vla_rl.core.catalogue import load
from vla_rl.core.plan import Plan
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.placement.assignments import Assignment, assign_workers
from vla_rl.runtime.planning.job_model import JobModel, reduce_job
from vla_rl.runtime.planning.profile import NOTHING, Profile
from vla_rl.runtime.planning.simulate import ROLES, Simulation
from vla_rl.toolkit.waiting import register_work

GRADIENT_BYTES, MOMENT_BYTES, MASTER_BYTES = 4, 8, 4
"""Bytes for each trainable parameter: its gradient, the two moments of AdamW, and its master if it has one."""
EVENTS = 40_000
"""About the most simulated events (simulator calls and tickets) where something varies; it limits steps."""
STEPS = {False: 8, True: 32}
"""Training steps whose mean is taken where something varies: without and with overlap."""
LAGS = (0, 1, 2, 3)
FAR = 8
"""Training steps to run ahead so that envs never wait."""
ENOUGH = 0.95
"""Share of the best throughput that a lag has to reach."""


@frozen(kw_only=True)
class Forecast:
    """Expected times, idle shares and memory of a job under a plan."""

    rollout: float
    """Seconds that a step waits for its tickets (without overlap: that they take), including the offload for it."""
    update: float
    """Seconds of the optimiser steps, after the step's tickets are there."""
    publish: float
    iteration: float
    """Seconds from one update to the next."""
    env_steps: float
    """Environment steps of an iteration."""
    idle: dict[str, float]
    """Role -> share of its workers' time that is idle."""
    device_bytes: float | None
    """Bytes of weights, gradients and optimiser on the fullest device, without activations. None: not known."""
    host_bytes: float
    """Host memory of the envs of the fullest worker, in bytes."""
    lag: int
    """Policy lag, in training steps, of the oldest chunk that is trained on."""

    @property
    def throughput(self) -> float:
        """Environment steps per second."""
        return self.env_steps / self.iteration if self.iteration else float("inf")

    @property
    def bottleneck(self) -> str:
        """Role whose workers are idle least."""
        return min(self.idle, key=lambda role: self.idle[role])


@frozen(kw_only=True)
class Overlap:
    """Seconds of a training step by the lag up to which rollouts may run ahead."""

    rollout: float
    """Seconds of a step's tickets: where envs never wait for another's reset, or where all begin at once, if less."""
    training: float
    """Seconds that a step takes besides: update, publication, and the work of the driver alone."""
    by_lag: dict[int, Forecast]

    @property
    def lower_bound(self) -> float:
        """Seconds that no overlap can undercut."""
        return max(self.rollout, self.training)

    def bound_share(self, lag: int) -> float:
        """Return the share of the bound that a lag reaches."""
        seconds = self.by_lag[lag].iteration
        return self.lower_bound / seconds if seconds else 1.0

    @property
    def smallest_lag(self) -> int | None:
        """Smallest lag that reaches enough of the bound; None: none of those tried."""
        return next((lag for lag in self.by_lag if self.bound_share(lag) >= ENOUGH), None)


def periodic_seconds(rollout: float, training: float, parts: int) -> float:
    """Return the seconds of a step whose rollout, in this many parts, is trained on part by part, with a barrier at its
    end: the law of RL-VLA3's tables (arXiv:2602.05765, Tables 3 and 4, for 4 parts)."""
    return max(rollout, training) + min(rollout, training) / parts


def forecast_job(
    plan: Plan,
    assignments: Sequence[Assignment],
    profile: Profile,
    *,
    tickets: int | None = None,
    chunk: int,
    max_lag: int = 0,
    part_size: float = 0.0,
    env_memory: int = 0,
    sharded: bool = False,
    steps: int | None = None,
) -> Forecast:
    """Forecast a job with these latencies under the plan.

    Args:
        tickets: tickets of a training step; None: one for each env.
        chunk: actions of a chunk step.
        max_lag: `asynchrony.max_lag`.
        part_size: tickets that learners begin with before the step is complete (streaming update); 0: none.
        env_memory: host bytes of an env.
        sharded: each learner holds a shard of the model (`train.sharding: full`).
        steps: training steps whose mean is taken, after some to begin with; None: as many as needed.
    """
    envs = sum(lane.num_envs for assignment in assignments for lane in assignment.lanes)
    tickets = envs if tickets is None else tickets
    rollout_offload = _offload_seconds(plan, assignments, profile, ("sim", "policy"))
    update_offload = _offload_seconds(plan, assignments, profile, ("learner",))
    job = reduce_job(plan, assignments, profile, tickets, rollout_offload + update_offload)
    measured = _measured_steps(job, profile, max_lag) if steps is None else steps
    before = min(max_lag + 1, max(LAGS) + 1) * (max_lag > 0)
    simulated = Simulation(job, profile, max_lag, part_size * job.tickets / tickets).run_steps(before + measured)
    last = simulated[-1]
    start = simulated[before - 1].end if before else 0.0
    busy_before = simulated[before - 1].busy if before else dict.fromkeys(ROLES, 0.0)
    seconds = last.end - start
    busy = {role: last.busy[role] - busy_before[role] for role in ROLES}
    length = fmean(profile.chunk_steps) if isinstance(profile.chunk_steps, tuple) else profile.chunk_steps
    return Forecast(
        rollout=fmean(step.rollout for step in simulated[before:]) + rollout_offload,
        update=fmean(step.update for step in simulated[before:]) + update_offload,
        publish=profile.publish if job.publishes else 0.0,
        iteration=seconds / measured,
        env_steps=tickets * (length * chunk if profile.env_steps is None else profile.env_steps),
        idle={role: 1 - busy[role] / (job.worker_count(role) * seconds) if seconds else 1.0 for role in ROLES},
        device_bytes=_device_bytes(plan, assignments, profile, sharded),
        host_bytes=max(sum(lane.num_envs for lane in assignment.lanes) for assignment in assignments) * env_memory,
        lag=max(step.lag for step in simulated),
    )


def forecast_spec(
    plan: Plan, spec: Spec, profile: Profile, max_lag: int | None = None, stream: bool | None = None
) -> Forecast:
    """Forecast a spec's job under the plan; `max_lag` and `stream` replace the spec's. UserError for uneven lanes. The
    local backend has one process whatever the plan says; this is what Ray would do."""
    rollout, envs, length = spec.rollout, spec.env.num_envs, profile.steady_profile.chunk_steps
    assert isinstance(length, int)
    streams = spec.asynchrony.streaming_update if stream is None else stream
    samples = spec.train.micro_batch * len(plan.hosting("learner"))
    return forecast_job(
        plan,
        assign_workers(plan, envs, one_process=False),
        profile,
        tickets=RunShape.from_spec(spec).tickets_per_step,
        chunk=rollout.chunk,
        max_lag=spec.asynchrony.max_lag if max_lag is None else max_lag,
        part_size=max(1.0, samples / length) if streams else 0.0,
        env_memory=load("env", spec.env.type, spec.plugins).env_memory,
        sharded=spec.train.sharding == "full",
    )


def compared_seconds(plan: Plan, spec: Spec, profile: Profile) -> float:
    """Return the seconds of an iteration, to compare many plans by. With `max_lag` that is the longer of rollout and
    update, and infinite for a plan that cannot run both at once."""
    if (spec.asynchrony.max_lag or spec.asynchrony.streaming_update) and not has_dedicated_learners(plan):
        return math.inf
    if not spec.asynchrony.max_lag:
        return forecast_spec(plan, spec, profile).iteration
    alone = forecast_spec(plan, spec, profile, 0, stream=False)
    return max(alone.rollout, alone.iteration - alone.rollout)


def has_dedicated_learners(plan: Plan) -> bool:
    """Return whether learners have workers of their own and nothing is offloaded, so that rollouts may overlap."""
    return not plan.offload and all(slot.roles == ("learner",) for slot in plan.slots if "learner" in slot.roles)


def overlap(plan: Plan, spec: Spec, profile: Profile) -> Overlap:
    """Forecast the effect of running ahead, under a plan whose learners have separate workers."""
    by_lag: dict[int, Forecast] = {}
    with register_work("forecasting what running ahead brings", total=len(LAGS)) as note:
        for lag in LAGS:
            note(len(by_lag))
            by_lag[lag] = forecast_spec(plan, spec, profile, lag)
    free = evolve(profile, learner=NOTHING, publish=0.0, rest=0.0)
    alone = forecast_spec(plan, spec, profile, 0, stream=False) if spec.asynchrony.streaming_update else by_lag[0]
    return Overlap(
        rollout=min(forecast_spec(plan, spec, free, FAR).iteration, alone.rollout),
        training=alone.iteration - alone.rollout,
        by_lag=by_lag,
    )


def _measured_steps(job: JobModel, profile: Profile, max_lag: int) -> int:
    """Return the training steps whose mean is taken: fewer for a big job."""
    if not profile.has_variation:
        return max_lag + 1
    lanes = sum(len(worker.lanes) for worker in job.workers.values())
    envs = sum(lane.num_envs for worker in job.workers.values() for lane in worker.lanes)
    length = fmean(profile.chunk_steps) if isinstance(profile.chunk_steps, tuple) else profile.chunk_steps
    events = lanes * length * math.ceil(job.tickets / envs) + job.tickets
    return max(1, min(STEPS[max_lag > 0], int(EVENTS / events)))


def _offload_seconds(plan: Plan, assignments: Sequence[Assignment], profile: Profile, roles: Sequence[str]) -> float:
    """Return the seconds until the last worker has offloaded its roles among these, one after another."""
    moved = {role: profile.offload.get(role, 0.0) for role in roles if role in plan.offload}
    return max(sum(moved.get(role, 0.0) for role in assignment.slot.roles) for assignment in assignments)


def _device_bytes(plan: Plan, assignments: Sequence[Assignment], profile: Profile, sharded: bool) -> float | None:
    """Return the bytes on the fullest device, in the phase that needs more; None: the model's size is not known. With
    sharding a learner holds a part of everything, besides the gathered weights of a policy in its worker."""
    if profile.parameters is None:
        return None
    weights = profile.parameters * profile.weight_bytes
    trainable = profile.parameters if profile.trainable is None else profile.trainable
    world = len(plan.hosting("learner")) if sharded else 1
    state = trainable * (GRADIENT_BYTES + MOMENT_BYTES) / world
    learned = weights / world
    if world > 1:
        learned += profile.masters * (MASTER_BYTES - profile.weight_bytes) / world  # shards are float32
    else:
        state += profile.masters * MASTER_BYTES
    phases: dict[Hashable, list[float]] = {}
    for assignment in assignments:
        acts, learns = bool(assignment.served), assignment.rank >= 0
        kept = learns and "learner" not in plan.offload
        own = weights if acts else 0.0
        if kept:  # one copy serves both roles, unless the learner's is a shard
            own += learned if world > 1 or not acts else 0.0
        rollout = own + state * kept
        update = (learned + state) * learns
        if acts and not learns and "policy" not in plan.offload:
            update += weights
        slot = assignment.slot
        key: Hashable = assignment.index if slot.index is None else (slot.node, slot.index)
        total = phases.setdefault(key, [0.0, 0.0])
        total[0] += rollout
        total[1] += update
    return max(max(both) for both in phases.values())
