"""The driver of a run: it starts the plan's workers and tells them what to do. No frames or weights pass it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import define

from vla_rl.core.events import Evaluation
from vla_rl.core.interrupts import Interrupts
from vla_rl.core.plan import Cluster, Plan
from vla_rl.core.run.runtime import Scaling
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.checks.plan import check_plan
from vla_rl.runtime.checks.run import check_cameras, check_simulators
from vla_rl.runtime.comm.backend import Backend
from vla_rl.runtime.comm.handles import Fleet, Handle
from vla_rl.runtime.comm.interfaces import HostInterface
from vla_rl.runtime.comm.tracing import clock_ahead
from vla_rl.runtime.driver.collecting.collector import Collector, Restarts
from vla_rl.runtime.driver.collecting.rollouts import EpisodeRequests, SampleMemory, StepRollouts
from vla_rl.runtime.driver.evaluation.evaluator import Enough, Evaluator
from vla_rl.runtime.driver.reports.compilation_monitor import CompilationMonitor
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.driver.reports.trace import Trace, traced
from vla_rl.runtime.driver.samples.sample_router import SampleRouter
from vla_rl.runtime.driver.startup import start_workers
from vla_rl.runtime.driver.training.learners import RunLearners
from vla_rl.runtime.driver.training.part import StepContext, StepPart
from vla_rl.runtime.driver.training.streaming_update import StreamingUpdate
from vla_rl.runtime.driver.training.update import StepUpdate
from vla_rl.runtime.placement.assignments import assign_workers
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.placement.hardware import describe_placement, smallest_gpu_memory
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.planning.profile import Profile


@define(eq=False, slots=False)
class RunWorkers:
    """Evaluates, reports progress and times, and ends the workers: the `Workers` of a runtime."""

    spec: Spec
    info: EnvInfo
    collector: Collector
    evaluator: Evaluator
    memory: SampleMemory
    compilation: CompilationMonitor
    fault_log: FaultLog
    trace: Trace

    def __attrs_post_init__(self) -> None:
        self.fleet: Fleet = self.collector.fleet
        self._on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None

    def listen(
        self,
        on_progress: Callable[[str, int, int], None],
        on_tick: Callable[[], None],
        on_fault: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._on_progress = on_progress
        self.fleet.backend.tick = on_tick
        self.fault_log.on_fault = on_fault

    def report_progress(self, phase: str, done: int, total: int) -> None:
        """Report progress to the listener of the run."""
        self._on_progress(phase, done, total)

    @traced
    def evaluate(self, step: int, frames: int = 0, enough: Enough | None = None) -> Evaluation:
        self.collector.wait_for_weights()
        return self.evaluator.evaluate_states(
            step, frames, lambda episodes: self._on_progress("eval", 0, episodes), enough
        )

    def describe_devices(self) -> str:
        calls = [worker.call(HostInterface.worker_device) for worker in self.fleet.workers]
        return describe_placement(self.fleet.assignments, self.fleet.get_all(calls))

    def progress(self, phase: str, done: int, total: int) -> tuple[str, int, int]:
        return self.fleet.describe_progress(self.spec, self.info, phase, done, total)

    def record(self, kind: str, step: int, env_steps: int, folder: Path, final: bool) -> None:
        fleet = self.fleet
        trace = self.trace
        if not trace.clock_offsets:
            for worker in fleet.workers:
                trace.clock_offsets[worker.worker_index] = clock_ahead(partial(self._read_clock, worker))
            trace.sizes = self.memory.measure_sizes()
        drained = fleet.get_from_living([worker.call(HostInterface.drain_trace) for worker in fleet.workers])
        of_living = {
            worker.worker_index: events
            for worker, events in zip(fleet.workers, drained, strict=True)
            if events is not None
        }
        trace.add_events(kind, step, env_steps, of_living)
        trace.write_file(folder, final=final)

    def time_shares(self) -> dict[str, dict[str, Any]]:
        return self.trace.role_shares()

    def notes(self) -> tuple[str, ...]:
        return (*self.info.notes, *_success_notes(self.spec), *self.compilation.notes)

    @property
    def faults(self) -> int:
        return self.fault_log.count

    def close(self) -> None:
        self.fleet.backend.close()

    def _read_clock(self, worker: Handle[HostInterface]) -> tuple[str, float]:
        return self.fleet.get(worker.call(HostInterface.read_clock))


def _success_notes(spec: Spec) -> tuple[str, ...]:
    """Return what a reader of results must know about who judges success."""
    rewards = spec.rewards
    if rewards is None:
        return ()
    subject = "success" if rewards.evaluation else "success of rollouts (not of evaluations)"
    return (
        f"{subject} is judged by reward model {rewards.type!r}, threshold {rewards.threshold:g}, not by the simulator",
    )


class Driver:
    """Implementation of `core.run.runtime.Runtime` by workers on a backend. It starts the workers and builds its parts
    around them: `rollouts` collect, `samples` are prepared and freed, `learners` train, publish and save, and `workers`
    evaluate, report and end."""

    def __init__(
        self,
        spec: Spec,
        make_backend: Callable[[], Backend],
        *,
        imitation: bool = False,
        acts_only: bool = False,
        scaling: Scaling = None,
        folder: Path | None = None,
        plan: Plan | None = None,
        measure: Callable[[Spec, Cluster], Profile] | None = None,
        interrupts: Interrupts | None = None,
        parts: Sequence[StepPart] = (),
    ):
        """Start the workers.

        Args:
            make_backend: creates the host of the workers; it is closed where the start fails, and by `workers.close`.
            imitation: True for `vla-rl sft`: the learners open the data that the spec names.
            acts_only: True for an evaluation: there are no learners, and policies load checkpoints themselves.
            scaling: the model's statistics, for a run that took them from its data; None: the model's own.
            folder: folder of the run, where trainers may keep data.
            plan: plan of the workers; None: the one for the spec's placement.
            measure: measures the cost of roles, for a placement that is planned by it.
            interrupts: stop requests, after which workers end their rollouts early.
            parts: parts of the training step that a run can do without.
        """
        self.spec = spec
        self.shape = RunShape.from_spec(spec)
        self.algorithm = build_algorithm(spec)
        self.parts = parts
        check_simulators(spec)
        self.backend = make_backend()
        self.backend.interrupts = interrupts or self.backend.interrupts
        try:
            self.plan = self._choose_plan(plan, measure, acts_only)
            self._start_fleet(imitation, scaling, None if folder is None else folder.absolute())
        except BaseException:
            self.backend.close()
            raise

    def _choose_plan(
        self, plan: Plan | None, measure: Callable[[Spec, Cluster], Profile] | None, acts_only: bool
    ) -> Plan:
        """Return the plan, or the one for the spec's placement."""
        cluster = self.backend.cluster_resources()
        chosen = plan or plan_for(self.spec, cluster, measure, acts_only=acts_only)
        if self.spec.runtime.backend != "local":
            check_plan(self.spec, chosen, cluster)
        return chosen

    def _start_fleet(self, imitation: bool, scaling: Scaling, folder: Path | None) -> None:
        """Start the workers, and build the driver's parts around them."""
        spec = self.spec
        local = spec.runtime.backend == "local"
        acts = any(part.acts for part in self.parts)
        assignments = assign_workers(self.plan, self.shape.envs, one_process=local, adds_envs=acts)
        trace = Trace(assignments)
        fleet = Fleet(self.backend, assignments, self.plan.offload)
        self.fleet = fleet
        self.backend.launch_workers(spec, assignments)
        started = start_workers(
            fleet,
            spec,
            self.plan,
            imitation=imitation,
            scaling=scaling,
            parts=self.parts,
            folder=folder,
            gpu_memory=smallest_gpu_memory() if spec.runtime.address is None else None,
        )
        check_cameras(spec, started.info, training=bool(fleet.learners) and not imitation, imitation=imitation)
        self.info = started.info
        self.scaling = started.scaling

        fault_log = FaultLog(spec)
        compilation = CompilationMonitor(fleet, spec)
        memory = SampleMemory(fleet, spec, self.plan, self.info)
        restarts = Restarts(fleet, spec.runtime.restarts, fault_log, stateful=bool(self.parts))
        router = SampleRouter(fleet, spec, self.algorithm.needs)
        self.collector = Collector(
            fleet,
            restarts,
            runs_ahead=self.shape.has_overlap,
            reports_each=self.shape.streaming,
            on_collected=router.transfers.prefetch_inputs if router.transfers.prefetches else None,
        )
        requests = EpisodeRequests(spec, started.train_states, self.algorithm.needs)
        evaluator = Evaluator(restarts, spec, self.info, started.eval_states, fault_log)
        self.workers = RunWorkers(spec, self.info, self.collector, evaluator, memory, compilation, fault_log, trace)
        self.rollouts = StepRollouts(self.collector, requests, memory, spec, self.info, fault_log, trace)
        update = partial(StreamingUpdate, algorithm=self.algorithm) if self.shape.streaming else StepUpdate
        self.samples = update(spec, self.rollouts, router, self.parts, trace)
        self.learners = RunLearners(
            spec,
            self.collector,
            requests,
            self.samples,
            self.parts,
            recorded_samples=started.recorded_samples,
            compilation=compilation,
            on_progress=self.workers.report_progress,
            trace=trace,
        )
        context = StepContext(
            fleet=fleet,
            algorithm=self.algorithm,
            info=self.info,
            rollouts=self.rollouts,
            router=router,
            fault_log=fault_log,
            trace=trace,
            on_progress=self.workers.report_progress,
        )
        for part in self.parts:
            part.connect_to_run(context)
