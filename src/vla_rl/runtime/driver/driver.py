"""The driver of a run: it starts the plan's workers and tells them what to do. No frames or weights pass it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from vla_rl.core.interrupts import Interrupts
from vla_rl.core.plan import Cluster, Plan
from vla_rl.core.run.runtime import Scaling
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.checks.plan import check_plan
from vla_rl.runtime.checks.run import check_cameras, check_simulators
from vla_rl.runtime.comm.backend import Backend
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.driver.collecting.collector import Collector, Restarts
from vla_rl.runtime.driver.collecting.rollouts import EpisodeRequests, SampleMemory, StepRollouts
from vla_rl.runtime.driver.evaluation.evaluator import Evaluator
from vla_rl.runtime.driver.lifecycle.startup import start_workers
from vla_rl.runtime.driver.lifecycle.workers import RunWorkers
from vla_rl.runtime.driver.reports.compilation_monitor import CompilationMonitor
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.driver.reports.trace import Trace
from vla_rl.runtime.driver.samples.sample_router import SampleRouter
from vla_rl.runtime.driver.training.learners import RunLearners
from vla_rl.runtime.driver.training.part import StepContext, StepPart
from vla_rl.runtime.driver.training.streaming_update import StreamingUpdate
from vla_rl.runtime.driver.training.update import StepUpdate
from vla_rl.runtime.placement.assignments import assign_workers
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.placement.hardware import smallest_gpu_memory
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.planning.profile import Profile


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
