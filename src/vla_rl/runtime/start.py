"""Entry points of this runtime, which the command line and `import vla_rl` call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve

from vla_rl.core.errors import UserError
from vla_rl.core.interrupts import Interrupts
from vla_rl.core.plan import Cluster, Plan, Slot
from vla_rl.core.run.imitation import Cloning, imitation_of
from vla_rl.core.run.loop import ReinforcementLearning, collect_rollout, finish_step, flow_of
from vla_rl.core.run.runtime import Scaling, StartRuntime
from vla_rl.core.run.state import State
from vla_rl.core.spec.sections import AsynchronySpec
from vla_rl.core.spec.spec import Component, Spec, has_own_policy, trains_on_transitions
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.comm.backend import Backend
from vla_rl.runtime.comm.backends.local import LocalBackend
from vla_rl.runtime.comm.backends.ray import RayBackend
from vla_rl.runtime.driver.driver import Driver
from vla_rl.runtime.driver.evaluation import checkpoint_evaluation
from vla_rl.runtime.driver.evaluation.evaluator import Enough
from vla_rl.runtime.driver.training.part import StepPart
from vla_rl.runtime.imagination.imagination import Imagination
from vla_rl.runtime.planning.profile import Cost, Profile
from vla_rl.runtime.run_folder.folder import RunFolder, read_state
from vla_rl.runtime.workers.host import WorkerHost

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


def check(spec: Spec, cluster: Cluster | None = None) -> str:
    """Raise UserError for everything that `run` would refuse, or `clone` for a spec with `imitation`. Return a line
    for each kind of GPU worker with the memory it needs; nothing for a spec that is cloned.

    Args:
        cluster: machine that is to run it; None: this one.
    """
    from vla_rl.runtime.gpu_memory.checks import check_gpu_memory

    section = spec.imitation
    trains = section is None or trains_on_transitions(spec)  # on demonstrations of `imitation.data`, too
    clones = section is not None and not (trains and section.steps is None)
    check_spec(spec, training=trains, imitation=clones, cluster=cluster)
    return "" if clones else check_gpu_memory(spec, cluster)


def run(spec: Spec, folder: Path | str, resume: bool = False) -> dict[str, Any]:
    """Train by RL in a folder, with `resume` from its last checkpoint. The result is that of `Session.run_attempts`."""
    check_spec(spec, training=True)
    return ReinforcementLearning.run_attempts(spec, RunFolder(Path(folder)), resume, _start_attempts())


def clone(spec: Spec, folder: Path | str, resume: bool = False) -> dict[str, Any]:
    """Train in a folder as the spec's `imitation:` says; otherwise as `run`."""
    imitation_of(spec)
    check_spec(spec, training=False, imitation=True)
    return Cloning.run_attempts(spec, RunFolder(Path(folder)), resume, _start_attempts())


def evaluate(
    spec: Spec,
    checkpoint: Path | None = None,
    progress: checkpoint_evaluation.Progress = lambda phase, done, total: None,
    record: Component | None = None,
    on_fault: checkpoint_evaluation.OnFault = lambda text: None,
    enough: Enough | None = None,
) -> dict[str, Any]:
    """Evaluate a spec's model, with the weights of a run's checkpoint folder if one is given.

    Args:
        progress: called now and then with the phase ("eval", or what it waits for), the number done and the total.
        record: hook to record with, as `component("hook", "lerobot", folder="episodes")`, in place of the spec's.
        on_fault: called with a message about each fault that the evaluation survived.
        enough: asked after each round over all envs whether to end; None: all states are evaluated.
    Raises CheckpointError when any of the checkpoint's files is damaged; UserError for an engine with its own policy.
    """
    if checkpoint is not None and has_own_policy(spec):
        file = checkpoint.parents[1] / "spec.yaml"
        engine = spec.rollout.engine.type
        raise UserError(
            f"engine {engine!r} has its own policy and takes no weights of a checkpoint; evaluate {file}, or "
            f"leave out rollout.engine"
        )
    check_spec(spec if record is None else evolve(spec, hooks=(record,)), training=False)
    spec = evolve(spec, hooks=() if record is None else (record,))
    state = State() if checkpoint is None else read_state(checkpoint)
    trainer = None if checkpoint is None else checkpoint / "trainer"
    return checkpoint_evaluation.evaluate_checkpoint(spec, state, trainer, start, progress, on_fault, enough)


def start(
    spec: Spec,
    *,
    imitation: bool = False,
    acts_only: bool = False,
    scaling: Scaling = None,
    folder: Path | None = None,
    plan: Plan | None = None,
    interrupts: Interrupts | None = None,
) -> Driver:
    """Start a run's runtime, as `core.run.runtime.StartRuntime`. `plan`: None: that of the spec's placement."""
    return Driver(
        spec,
        lambda: backend_of(spec),
        imitation=imitation,
        acts_only=acts_only,
        scaling=scaling,
        folder=folder,
        plan=plan,
        measure=partial(measure_profile, lambda short, plan: start(short, plan=plan)),
        interrupts=interrupts,
        parts=() if imitation else make_parts(spec, folder),
    )


def _start_attempts() -> StartRuntime:
    """Return `start` for the attempts at a run: each has the plan of the one before, so that it waits for a lost node.
    After an attempt that could not start, the next is planned anew."""
    plans: list[Plan] = []

    def start_attempt(spec: Spec, **options: Any) -> Driver:
        driver = start(spec, plan=plans.pop() if plans else None, **options)
        plans.append(driver.plan)
        return driver

    return start_attempt


def make_parts(spec: Spec, folder: Path | None) -> list[StepPart]:
    """Return the parts of the training step that the spec asks for. `folder`: run folder; None: none."""
    if spec.imagination is None or folder is None:
        return []
    return [Imagination(spec, folder)]


def backend_of(spec: Spec) -> Backend:
    """Create the host of a spec's workers: this process, or Ray."""
    if spec.runtime.backend == "local":
        return LocalBackend(WorkerHost)
    return RayBackend(WorkerHost, spec.runtime.address, spec.runtime.deadline_s)
