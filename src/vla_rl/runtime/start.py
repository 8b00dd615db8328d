"""Runs on this runtime: what the command line and `import vla_rl` call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import evolve

from vla_rl.core.interrupts import Interrupts
from vla_rl.core.plan import Cluster, Plan
from vla_rl.core.run.imitation import Cloning, imitation_of
from vla_rl.core.run.loop import ReinforcementLearning
from vla_rl.core.run.runtime import Scaling
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import Component, Spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.comm.backend import Backend
from vla_rl.runtime.comm.backends.local import LocalBackend
from vla_rl.runtime.comm.backends.ray import RayBackend
from vla_rl.runtime.driver import evaluation
from vla_rl.runtime.driver.driver import Driver
from vla_rl.runtime.driver.measure import measure
from vla_rl.runtime.planning.profile import Profile
from vla_rl.runtime.run_folder.folder import RunFolder, read_state
from vla_rl.runtime.workers.host import WorkerHost


def run(spec: Spec, folder: Path | str, resume: bool = False) -> dict[str, Any]:
    """Train by reinforcement learning in a folder, from its last checkpoint with `resume`; as `Session.run`."""
    check_spec(spec, training=True)
    return ReinforcementLearning.run(spec, RunFolder(Path(folder)), resume, start)


def clone(spec: Spec, folder: Path | str, resume: bool = False) -> dict[str, Any]:
    """Train as the spec's `imitation:` says, in a folder; as `run`."""
    imitation_of(spec)
    check_spec(spec, training=False, imitation=True)
    return Cloning.run(spec, RunFolder(Path(folder)), resume, start)


def evaluate(
    spec: Spec,
    checkpoint: Path | None = None,
    progress: evaluation.Progress = lambda phase, done, total: None,
    record: Component | None = None,
) -> dict[str, Any]:
    """Evaluate a spec's model, with the weights of a checkpoint folder of a run when one is given; `progress` is called
    from time to time with what goes on ("eval", or what it waits for, "starting rows: TASK"), what is done and all
    of it. `record`: the hook that records the episodes, such as `component("hook", "lerobot", folder="episodes")`; the
    spec's own hooks hear nothing. Raises CheckpointError when any of the checkpoint's files is damaged."""
    check_spec(spec if record is None else evolve(spec, hooks=(record,)), training=False)
    spec = evolve(spec, hooks=() if record is None else (record,))
    if checkpoint is None:
        return evaluation.evaluate(spec, State(), None, start, progress)
    return evaluation.evaluate(spec, read_state(checkpoint), checkpoint / "trainer", start, progress)


def start(
    spec: Spec,
    *,
    imitation: bool = False,
    scaling: Scaling = None,
    folder: Path | None = None,
    plan: Plan | None = None,
    interrupts: Interrupts | None = None,
) -> Driver:
    """Start the runtime of a run, as `core.runtime.StartRuntime`. `plan`: of the workers; None: that of the spec's
    placement."""
    return Driver(
        spec,
        lambda: backend_of(spec),
        imitation=imitation,
        scaling=scaling,
        folder=folder,
        plan=plan,
        measure=measure_roles,
        interrupts=interrupts,
    )


def backend_of(spec: Spec) -> Backend:
    """Make what hosts the workers of a spec: this process, or Ray."""
    if spec.runtime.backend == "local":
        return LocalBackend(WorkerHost)
    return RayBackend(WorkerHost, spec.runtime.address, spec.runtime.deadline_s)


def measure_roles(spec: Spec, cluster: Cluster) -> Profile:
    """Measure what the roles of a spec take on these machines, for a placement that plans by it."""
    return measure(lambda short, plan: start(short, plan=plan), spec, cluster)
