"""Measurement of what the roles of a job cost, on one worker with as many envs as a device would get."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from attrs import evolve

from vla_rl.core.plan import Cluster, Plan, Slot
from vla_rl.core.run.loop import collect_rollout, finish_step, flow_of
from vla_rl.core.run.state import State
from vla_rl.core.spec.sections import AsynchronySpec
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.driver.driver import Driver
from vla_rl.runtime.planning.profile import Cost, Profile

CHUNK_STEPS = 2
logger = logging.getLogger(__name__)


def measure_profile(start: Callable[[Spec, Plan], Driver], spec: Spec, cluster: Cluster) -> Profile:
    """Start a worker with all roles, roll out two chunk steps twice, and train on the second. Weights are dropped."""
    devices = cluster.gpus or max(1, int(cluster.cpus))
    group = spec.rollout.group_size
    envs = max(group, spec.env.num_envs // devices // group * group)
    steps = CHUNK_STEPS * spec.rollout.chunk
    auto_reset = spec.rollout.auto_reset
    rollout = evolve(
        spec.rollout,
        episodes=envs if auto_reset is None else None,
        auto_reset=None if auto_reset is None else evolve(auto_reset, steps=steps),
        max_steps=min(steps, spec.rollout.max_steps or steps),
        resample=None,
    )
    train = evolve(spec.train, steps=2)
    short = evolve(spec, env=evolve(spec.env, num_envs=envs), rollout=rollout, train=train, asynchrony=AsynchronySpec())
    slot = Slot(
        roles=("sim", "policy", "learner"),
        device="cuda" if cluster.gpus else "cpu",
        cpus=max(1.0, cluster.cpus // devices),
        gpus=1.0 if cluster.gpus else 0.0,
    )
    runtime = start(short, Plan(slots=(slot,)))
    try:
        limit = max(task.max_steps for task in runtime.info.tasks)
        flow = flow_of(short, State())
        collect_rollout(runtime, flow, 1)  # a warm-up: allocations and compilations are not part of a step's cost
        finish_step(runtime, 1, trained=False)
        flow.finish_step("discarded")
        measured, _, metrics = collect_rollout(runtime, flow, 2)
        prepared = runtime.samples.prepare(measured, np.arange(measured.valid.shape[1]))
        update_metrics = runtime.learners.train(prepared, runtime.algorithm.advantages(prepared))
    finally:
        runtime.workers.close()
    measured_steps = measured.valid.shape[0]
    cpus = None if cluster.gpus else slot.cpus
    chunk_steps = -(-(spec.rollout.max_steps or limit) // spec.rollout.chunk)
    samples = (spec.rollout.episodes or spec.env.num_envs) * chunk_steps
    profile = Profile(
        chunk_steps=chunk_steps,
        sim=Cost(seconds=metrics["time/env"] / measured_steps, num_envs=envs),
        policy=Cost(seconds=metrics["time/policy"] / measured_steps, num_envs=envs, cpus=cpus),
        learner=Cost(seconds=update_metrics["time/learner"] * samples / update_metrics["update/samples"], cpus=cpus),
    )
    logger.info("measured for %d envs: %s", envs, profile)
    return profile
