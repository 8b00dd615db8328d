"""The driver of a run: it starts the plan's workers and tells them what to do. No frames and no weights pass through
it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from attrs import evolve

from vla_rl.core.events import Evaluation
from vla_rl.core.interrupts import Interrupts
from vla_rl.core.plan import Cluster, Plan
from vla_rl.core.run.flow import Ticket
from vla_rl.core.run.runtime import Scaling
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, Array, Rollout
from vla_rl.runtime.checks.imagination import check_episodes
from vla_rl.runtime.checks.run import check_cameras, check_plan, check_simulators
from vla_rl.runtime.comm.backend import Backend
from vla_rl.runtime.comm.handles import Fleet, Handle
from vla_rl.runtime.comm.interfaces import HostInterface, LearnerInterface, PolicyInterface
from vla_rl.runtime.comm.tracing import clock_ahead
from vla_rl.runtime.driver.behaviour_cloning import ImitationTrainer, bc_warmup, start_behaviour_cloning
from vla_rl.runtime.driver.collector import Collector
from vla_rl.runtime.driver.compilation_monitor import CompilationMonitor
from vla_rl.runtime.driver.episode_requests import EpisodeRequests
from vla_rl.runtime.driver.evaluation_rollout import Evaluator
from vla_rl.runtime.driver.faults import FaultLog
from vla_rl.runtime.driver.imagination import Imagination, ImaginationTrainer, NoImagination
from vla_rl.runtime.driver.restarts import Restarts
from vla_rl.runtime.driver.rollouts import Rollouts
from vla_rl.runtime.driver.sample_memory import SampleMemory
from vla_rl.runtime.driver.sample_router import SampleRouter
from vla_rl.runtime.driver.startup import start_workers
from vla_rl.runtime.driver.streaming_update import StreamingUpdate
from vla_rl.runtime.driver.trace import Trace, traced
from vla_rl.runtime.driver.training_step import TrainingStep
from vla_rl.runtime.driver.update import StepUpdate, UpdateStrategy
from vla_rl.runtime.placement.assignments import assign
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.placement.hardware import describe, smallest_gpu_memory
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.planning.profile import Profile

logger = logging.getLogger(__name__)
WEIGHTS = "learner.pt"
PAST_WEIGHTS = "past.pt"
"""Files of a checkpoint's trainer folder."""


class Driver:
    """Implementation of `core.run.runtime.Runtime` by workers on a backend.

    It starts and ends the workers, publishes weights, and writes checkpoints and the trace. What happens in a step is
    the work of its parts: `rollouts` collect, `training_step` updates, `imagination` uses the world model, `evaluator`
    evaluates.
    """

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
    ):
        """Start the workers.

        Args:
            make_backend: creates the host of the workers; it is closed where the start fails, and by `close`.
            imitation: True for `vla-rl sft`: the learners open the data that the spec names.
            acts_only: True for an evaluation: there are no learners, and policies load checkpoints themselves.
            scaling: normalisation statistics of the model, for a run that took them from its data; None: the model's
                own.
            folder: folder of the run, where trainers may keep data; with one, the policy trains in imagination if the
                spec has a world model.
            plan: plan of the workers; None: the one for the spec's placement.
            measure: measures the cost of roles, for a placement that is planned by it.
            interrupts: stop requests, after which workers end their rollouts early.
        """
        self.spec = spec
        self.shape = RunShape.of(spec)
        self.algorithm = build_algorithm(spec)
        self.version = 0
        self.on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None
        self.fault_log = FaultLog(spec)
        check_simulators(spec)
        self.backend = make_backend()
        self.backend.interrupts = interrupts or self.backend.interrupts
        try:
            self.plan = self._choose_plan(plan, measure, acts_only)
            world_model_folder = None
            if spec.imagination is not None and folder is not None and not imitation:
                world_model_folder = folder.absolute()
            self._start(imitation, scaling, world_model_folder, None if folder is None else folder.absolute())
        except BaseException:
            self.backend.close()
            raise

    # ----------------------------------------------------------------------------------------------- start and stop

    def _choose_plan(
        self, plan: Plan | None, measure: Callable[[Spec, Cluster], Profile] | None, acts_only: bool
    ) -> Plan:
        """Return the plan, or the one for the spec's placement."""
        cluster = self.backend.cluster()
        chosen = plan or plan_for(self.spec, cluster, measure, acts_only=acts_only)
        if self.spec.runtime.backend != "local":
            check_plan(self.spec, chosen, cluster)
        return chosen

    def _start(self, imitation: bool, scaling: Scaling, world_model_folder: Path | None, folder: Path | None) -> None:
        """Start the workers, and build the driver's parts around them.

        Args:
            world_model_folder: run folder, if the policy trains in imagination.
            folder: run folder.
        """
        spec = self.spec
        imagines = world_model_folder is not None
        local = spec.runtime.backend == "local"
        assignments = assign(self.plan, self.shape.envs, one_process=local, imagines=imagines)
        self.trace = Trace(assignments)
        self.fleet = Fleet(self.backend, assignments, self.plan.offload)
        self.backend.start(spec, assignments)
        started = start_workers(
            self.fleet,
            spec,
            self.plan,
            imitation=imitation,
            scaling=scaling,
            recording_folder=world_model_folder,
            folder=folder,
            gpu_memory=smallest_gpu_memory() if spec.runtime.address is None else None,
        )
        check_cameras(spec, started.info, training=bool(self.fleet.learners) and not imitation, imitation=imitation)
        self.info = evolve(started.info, notes=(*started.info.notes, *_success_notes(spec)))
        self.scaling = started.scaling
        self.recorded_samples = started.recorded_samples
        self.memory = SampleMemory(self.fleet, spec, self.plan, self.info)
        self._compiling = CompilationMonitor(self.fleet, spec)

        restarts = Restarts(self.fleet, spec.runtime.restarts, self.fault_log.announce, imagines)
        router = SampleRouter(self.fleet, spec, self.algorithm.needs)
        self.collector = Collector(
            self.fleet,
            restarts,
            runs_ahead=self.shape.overlaps,
            reports_each=self.shape.streaming,
            on_collected=router.transfers.prefetch if router.transfers.prefetches else None,
        )
        self.requests = EpisodeRequests(spec, started.train_states, self.algorithm.needs)
        self.rollouts = Rollouts(self.collector, self.requests, spec, self.info, self.fault_log, self.trace)
        self.imagination: Imagination = NoImagination()
        if imagines:
            check_episodes(spec, self.algorithm, self.info)
            self.imagination = ImaginationTrainer(self.collector, router, spec, self.algorithm, self.fault_log)
        self.strategy: UpdateStrategy = StepUpdate(spec, self.collector, router)
        if self.shape.streaming:
            self.strategy = StreamingUpdate(spec, self.algorithm, self.collector, router, self.trace)
        self.training_step = TrainingStep(self.collector, router, self.strategy, self.imagination)
        self.evaluator = Evaluator(restarts, spec, self.info, started.eval_states, self.fault_log)

    def close(self) -> None:
        self.backend.close()

    # ----------------------------------------------------------------------------------------------- one iteration

    @traced
    def collect(self, step: int, tickets: Sequence[Ticket]) -> None:
        """Have tickets rolled out that were issued while `step` ran. Does not wait."""
        self.memory.check()
        self.rollouts.collect(step, self.version, tickets)

    @traced
    def wait_for_tickets(self, needed: Collection[int]) -> list[int]:
        """Wait until some tickets are collected, if possible all that are needed. Return the collected tickets."""
        return self.rollouts.wait_for_tickets(needed)

    @traced
    def assemble(self, step: int, tickets: Sequence[int]) -> tuple[Rollout, dict[str, float]]:
        """Assemble these collected tickets. Return (trajectory records, metrics)."""
        return self.rollouts.assemble(step, self.version, tickets)

    def streaming_update(self, step: int, tickets: Sequence[int]) -> None:
        """Let learners begin with these collected tickets, the first of all that the step consumes."""
        self.strategy.begin(step, self.version, tickets)

    @traced
    def train_in_imagination(self, step: int) -> dict[str, float]:
        """Fit the world model, and roll out the policy in it. Return metrics."""
        return self.imagination.train(step, self.rollouts.batch, self.version, self.on_progress)

    @property
    def imagination_totals(self) -> dict[str, Any]:
        """Totals of training in imagination over the run."""
        return self.imagination.totals

    @traced
    def prepare(self, selected: Rollout, columns: Array) -> Rollout:
        """Prepare what is trained on, and return it: replayed groups first, then the columns (indices) of the last
        rollout that `selected` consists of.
        """
        return self.training_step.prepare(self.version, self.rollouts.batch, selected, columns)

    @traced
    def update(self, prepared: Rollout, advantages: Advantages) -> dict[str, float]:
        """Train on what was prepared. Return metrics."""
        return self.training_step.update(prepared, advantages)

    def finish(self, trained: bool) -> dict[str, float]:
        """Drop the samples of the last rollout, and publish the weights, or count a version with unchanged weights.
        Return metrics.
        """
        start = perf_counter()
        batch = self.rollouts.batch
        self.strategy.finish(trained)
        self.rollouts.finish()
        metrics = self.training_step.finish(batch, trained)
        self.version += 1
        if trained:
            self.publish()
        else:
            self.fleet.skip(self.version)
        metrics |= {"time/publish": perf_counter() - start} | self.fleet.phases.metrics()
        compilation = self._compiling.report()
        if compilation is None:
            return metrics
        self.info = evolve(self.info, notes=(*self.info.notes, *compilation.notes))
        return metrics | compilation.metrics()

    # ----------------------------------------------------------------------------------- evaluation and imitation

    @traced
    def evaluate(self, step: int, frames: int = 0) -> Evaluation:
        """Roll out every evaluation state once for each repeat, and keep the frames of `frames` episodes."""
        self.collector.wait_for_weights()
        return self.evaluator.evaluate(step, frames, lambda episodes: self.on_progress("eval", 0, episodes))

    @traced
    def bc_warmup(self) -> dict[str, float]:
        """Clone the simulator's scripted expert on all learners (`bc_warmup:` in the spec). Return metrics."""
        start = perf_counter()
        metrics = bc_warmup(self.fleet, self.spec, self.on_progress)
        self.publish()
        return metrics | {"time/bc_warmup": perf_counter() - start}

    def imitation(self) -> ImitationTrainer:
        """Return the demonstrations of the spec's `imitation:`, ready to train on."""
        return start_behaviour_cloning(self.fleet, self.spec, self.recorded_samples, self.on_progress)

    # ------------------------------------------------------------------------------------------- state and weights

    @traced
    def publish(self) -> None:
        """Publish the weights. Policies in a learner's process already hold them; the others get them by reference.

        Where rollouts run ahead, only tickets that need the new version wait for it; otherwise this call waits.
        """
        self.collector.wait_for_weights()
        self.collector.publishing = self.fleet.publish(self.version, self.spec.runtime.check_weights)
        if not self.shape.overlaps:
            self.collector.wait_for_weights()

    @traced
    def save(self, model_folder: Path, trainer_folder: Path) -> None:
        """Write the model in its public format, and the exact state from which a run resumes."""
        weights = trainer_folder / WEIGHTS
        calls = [learner.call(LearnerInterface.save, model_folder, weights) for learner in self.fleet.learners]
        self.fleet.get_all(calls)
        self.requests.save(trainer_folder)
        self.imagination.save(trainer_folder)
        if self.shape.pinned_lag:
            past_weights = trainer_folder / PAST_WEIGHTS
            self.fleet.get(self.fleet.policies[0].call(PolicyInterface.save_past, past_weights))

    def load(self, trainer_folder: Path) -> None:
        """Restore what `save` wrote; the weights alone where nothing learns."""
        weights = trainer_folder / WEIGHTS
        if not self.fleet.learners:
            self.fleet.get_all([p.call(PolicyInterface.load_checkpoint, weights) for p in self.fleet.policies])
            return
        versions = self.fleet.get_all([learner.call(LearnerInterface.load, weights) for learner in self.fleet.learners])
        self.version = versions[0]
        self.requests.load(trainer_folder)
        self.imagination.load(trainer_folder)
        if self.shape.replays:
            logger.warning("the replay buffer is no part of a checkpoint: it is empty, and fills anew")
        if self.shape.pinned_lag:
            past_weights = trainer_folder / PAST_WEIGHTS
            self.fleet.get_all([policy.call(PolicyInterface.load_past, past_weights) for policy in self.fleet.policies])
        self.publish()

    # -------------------------------------------------------------------------------------------- reports and trace

    @property
    def on_tick(self) -> Callable[[], None]:
        """Function that is called from time to time while the driver waits for workers."""
        return self.backend.tick

    @on_tick.setter
    def on_tick(self, on_tick: Callable[[], None]) -> None:
        self.backend.tick = on_tick

    @property
    def on_fault(self) -> Callable[[str], None]:
        """Function that is called with a message about each fault."""
        return self.fault_log.on_fault

    @on_fault.setter
    def on_fault(self, on_fault: Callable[[str], None]) -> None:
        self.fault_log.on_fault = on_fault

    @property
    def faults(self) -> int:
        """Number of envs that broke and were replaced."""
        return self.fault_log.count

    def devices(self) -> str:
        """Return a description of the device of each role."""
        calls = [worker.call(HostInterface.device) for worker in self.fleet.workers]
        return describe(self.fleet.assignments, self.fleet.get_all(calls))

    def progress(self, phase: str, done: int, total: int) -> tuple[str, int, int]:
        """Return the progress of a phase, as `Runtime.progress`."""
        return self.fleet.progress(self.spec, self.info, phase, done, total)

    def record(self, kind: str, step: int, env_steps: int, folder: Path, final: bool) -> None:
        """Fetch the workers' events and write the trace file. `env_steps`: environment steps of the run so far."""
        fleet = self.fleet
        trace = self.trace
        if not trace.clock_offsets:
            for worker in fleet.workers:
                trace.clock_offsets[worker.worker] = clock_ahead(partial(self._read_clock, worker))
            trace.sizes = self.memory.sizes()
        drained = fleet.get_all([worker.call(HostInterface.drain_trace) for worker in fleet.workers])
        trace.add(kind, step, env_steps, {w.worker: events for w, events in zip(fleet.workers, drained, strict=True)})
        trace.write(folder, final=final)

    def roles(self) -> dict[str, dict[str, Any]]:
        """Return each role's shares of its workers' time."""
        return self.trace.roles()

    def _read_clock(self, worker: Handle[HostInterface]) -> tuple[str, float]:
        return self.fleet.get(worker.call(HostInterface.clock))


def _success_notes(spec: Spec) -> tuple[str, ...]:
    """Return what a reader of results must know about who tells success."""
    rewards = spec.rewards
    if rewards is None:
        return ()
    where = "success" if rewards.evaluation else "success of rollouts (not of evaluations)"
    return (f"{where} is told by reward model {rewards.type!r}, threshold {rewards.threshold:g}, not by the simulator",)
