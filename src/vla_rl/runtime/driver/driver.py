"""The driver of a run: it starts the plan's workers and tells them what to do. No frames and no weights pass through
it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

from attrs import evolve

from vla_rl.core.events import Evaluation
from vla_rl.core.interrupts import Interrupts
from vla_rl.core.plan import Cluster, Plan
from vla_rl.core.run.flow import Ticket
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, Array, EnvInfo, Rollout
from vla_rl.runtime.checks.run import check_plan, check_simulators
from vla_rl.runtime.comm.backend import Backend
from vla_rl.runtime.comm.handles import Fleet, Handle
from vla_rl.runtime.comm.interfaces import EnvInterface, HostInterface, LearnerInterface, PolicyInterface
from vla_rl.runtime.comm.tracing import clock_ahead
from vla_rl.runtime.driver import figures
from vla_rl.runtime.driver.assembler import RolloutBatch, assemble
from vla_rl.runtime.driver.behaviour_cloning import BehaviourCloning, of_data, of_expert, warm_up
from vla_rl.runtime.driver.collector import Collector
from vla_rl.runtime.driver.episode_requests import EpisodeRequests
from vla_rl.runtime.driver.evaluation_rollout import evaluate, tickets_for
from vla_rl.runtime.driver.imagination import ImaginationTrainer
from vla_rl.runtime.driver.recordings import of_rollout
from vla_rl.runtime.driver.restarts import Restarts
from vla_rl.runtime.driver.sample_router import SampleRouter
from vla_rl.runtime.driver.streaming_update import StreamingUpdate
from vla_rl.runtime.driver.trace import Trace, traced
from vla_rl.runtime.driver.update import update
from vla_rl.runtime.messages.requests import too_many_faults
from vla_rl.runtime.placement.assignments import assign
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.placement.hardware import describe
from vla_rl.runtime.planning.memory import check_memory, trajectory_bytes
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.planning.profile import Profile

Progress = Callable[[str, int, int], None]
logger = logging.getLogger(__name__)
Scaling = Mapping[str, Mapping[str, Sequence[float]]] | None


class Driver:
    """Implementation of `core.runtime.Runtime` by workers on a backend."""

    def __init__(
        self,
        spec: Spec,
        make_backend: Callable[[], Backend],
        *,
        imitation: bool = False,
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
            scaling: normalisation statistics of the model, for a run that took them from its data; None: the model's
                own.
            folder: folder of the run; with one, the policy trains in imagination if the spec has a world model.
            plan: plan of the workers; None: the one for the spec's placement.
            measure: measures the cost of roles, for a placement that is planned by it.
            interrupts: stop requests, after which workers end their rollouts early.
        """
        self.spec, self.scaling = spec, scaling
        self.shape = RunShape.of(spec)
        self.demonstrations = 0
        """Number of samples of the data that the learners opened."""
        self.algorithm = build_algorithm(spec)
        local = spec.runtime.backend == "local"
        check_simulators(spec)
        self.version = 0
        self.progress: Progress = lambda phase, done, total: None
        self.on_fault: Callable[[str], None] = lambda text: None
        self.faults = self._new_faults = 0
        self.gathered: RolloutBatch | None = None
        """The last rollout, until its step is over."""
        self.chosen: RolloutBatch | None = None
        """What is trained on next ..."""
        self.preparing = 0.0
        """... and the seconds that it took to prepare it."""
        self.fits = not self.shape.overlaps and not self.shape.replays
        """True once the samples that learners may hold were compared with the available memory, or where that is not
        needed.
        """
        self.backend = make_backend()
        self.backend.interrupts = interrupts or self.backend.interrupts
        try:
            self.plan = plan or plan_for(spec, self.backend.cluster(), measure)
            if not local:
                check_plan(spec, self.plan)
            practises = spec.imagination is not None and folder is not None and not imitation
            assignments = assign(self.plan, self.shape.envs, one_process=local, imagines=practises)
            self.fleet = Fleet(self.backend, assignments, self.plan.offload)
            self.trace = Trace(assignments)
            self.restarts = Restarts(self.fleet, spec.runtime.restarts, lambda text: self.on_fault(text), practises)
            self.supply = SampleRouter(self.fleet, spec, self.algorithm.needs)
            self.feeding = (
                StreamingUpdate(self.fleet, spec, self.algorithm, self.supply) if self.shape.streaming else None
            )
            self.tickets = Collector(
                self.fleet,
                self.restarts,
                ahead=self.shape.overlaps,
                each=self.shape.streaming,
                arrived=self.supply.send if self.supply.early else None,
            )
            self.info = self._start(imitation, folder.absolute() if folder and practises else None)
            self.imagining = ImaginationTrainer(self.tickets, self.supply, spec, self.algorithm, practises)
            self.imagining.check(self.info)
        except BaseException:
            self.backend.close()
            raise

    # ----------------------------------------------------------------------------------------------- one iteration

    @traced
    def play(self, step: int, tickets: Sequence[Ticket]) -> None:
        """Have tickets rolled out that were issued while `step` ran. Does not wait.

        They are split into batches, rolled out one after another: one step's tickets each, or with streaming updates
        one ticket for each env.
        """
        self._check_memory()
        size = self.shape.envs if self.feeding else self.shape.tickets_per_step
        batches = [list(batch) for _, batch in groupby(tickets, lambda ticket: ticket.number // size)]
        self.tickets.play([[self.starts.of(ticket, step, self.version) for ticket in batch] for batch in batches])

    @traced
    def finished(self, needed: Collection[int]) -> list[int]:
        """Wait until some tickets are finished, if possible all that are needed. Return the finished tickets."""
        numbers = self.tickets.finished(needed)
        self._new_faults += len(self.tickets.since.faults)
        self._report_faults(self.tickets.since.faults)
        return numbers

    @traced
    def rollout(self, step: int, tickets: Sequence[int]) -> tuple[Rollout, dict[str, float]]:
        """Assemble these finished tickets. Return (trajectory records, metrics)."""
        played = [self.tickets.played[number] for number in tickets]
        self.gathered = assemble(step, played, self.shape.group_size)
        self.trace.tickets = [len(ticket.finished.light["valid"]) for _, ticket in played]
        rollout = of_rollout(self.fleet, self.spec, self.gathered.rollout, tickets)
        return rollout, {
            **figures.of_episodes(rollout.episodes),
            **figures.of_work(self.tickets.since),
            **(figures.of_ages(rollout, self.version) if self.tickets.ahead else {}),
            **self.tickets.metrics(len(tickets)),
            **self.starts.note(step, rollout.episodes, tickets[-1]),
            "faults/envs": float(self._new_faults),
        }

    def feed(self, step: int, tickets: Sequence[int]) -> None:
        """Let learners begin with these finished tickets, the first of all that the step consumes. Does nothing without
        streaming updates.
        """
        if self.feeding is not None:
            further = tickets[len(self.feeding.judged) :]
            if self.feeding.worthwhile([self.tickets.played[number] for number in further]):
                self.judge(step, further)

    @traced
    def judge(self, step: int, tickets: Sequence[int]) -> None:
        """Score the groups of these tickets, and let learners begin with them."""
        assert self.feeding is not None
        self.feeding.feed(step, self.version, [self.tickets.played[number] for number in tickets])

    @traced
    def practise(self, step: int) -> dict[str, float]:
        """Fit the world model, and train the policy in imagination; does nothing without a world model. Return
        metrics.
        """
        assert self.gathered is not None
        return self.imagining.practise(step, self.gathered, self.version, self.progress, self._report_faults)

    @property
    def imagination_totals(self) -> dict[str, Any]:
        """Return the sums of `practise` over the run."""
        return self.imagining.so_far

    @traced
    def prepare(self, kept: Rollout, keep: Array) -> Rollout:
        """Prepare what is trained on, and return it: replayed groups first, then the columns `keep` (indices) of the
        last rollout, which `kept` was cut to.
        """
        assert self.gathered is not None
        before = perf_counter()
        self.tickets.forget()
        choose = self.supply.prepare if self.feeding is None else self.feeding.prepare
        self.chosen = choose(self.version, self.gathered, kept, keep)
        self.preparing = perf_counter() - before
        return self.chosen.rollout

    @traced
    def update(self, prepared: Rollout, advantages: Advantages) -> dict[str, float]:
        """Train on what was prepared. Return metrics."""
        assert self.chosen is not None
        before, chosen, self.chosen = perf_counter(), evolve(self.chosen, rollout=prepared), None
        chosen, advantages = self.imagining.beside(chosen, advantages)
        if self.feeding is None:
            metrics = update(self.fleet, self.spec, chosen, advantages, self.tickets.get_all)
        else:
            metrics = self.feeding.update(chosen, advantages, self.tickets.get_all)
        return {**self.supply.metrics, **metrics, "time/update": self.preparing + perf_counter() - before}

    def finish(self, trained: bool) -> dict[str, float]:
        """Drop the samples of the last rollout, and publish the weights, or count a version with unchanged weights.
        Return metrics.
        """
        assert self.gathered is not None
        before, (gathered, self.gathered) = perf_counter(), (self.gathered, None)
        if self.feeding:
            self.feeding.end(trained)
        numbers = gathered.numbers.tolist()
        self.starts.consume([self.tickets.played[number][1].finished for number in numbers])
        self.tickets.release(numbers)
        metrics = self.supply.finish(self.imagining.whole(gathered), trained)
        self.imagining.finish(trained)
        if not trained:
            self.tickets.forget()
        self._new_faults = 0
        self.version += 1
        if trained:
            self.publish()
        else:
            self.fleet.skip(self.version)
        return metrics | {"time/publish": perf_counter() - before} | self.fleet.phases.metrics()

    # ----------------------------------------------------------------------------------- evaluation and imitation

    @traced
    def evaluate(self, step: int, frames: int = 0) -> Evaluation:
        """Roll out every evaluation state once for each repeat, and keep the frames of `frames` episodes."""
        self.tickets.arrive()
        tickets = tickets_for(self.spec, self.eval_states, frames, step)
        self.progress("eval", 0, len(tickets))
        play = partial(evaluate, self.fleet, self.spec, self.info, step, tickets, self._report_faults)
        return self.restarts.surviving(play)

    @traced
    def warm_up(self) -> dict[str, float]:
        """Clone the simulator's scripted expert on all learners (`bc_warmup:` in the spec). Return metrics."""
        before = perf_counter()
        metrics = warm_up(self.fleet, self.spec, self.progress)
        self.forget_demonstrations()
        return metrics | {"time/bc_warmup": perf_counter() - before}

    def forget_demonstrations(self) -> None:
        """Free the demonstrations, and reset the optimiser's state before RL."""
        self.fleet.get_all([learner.call(LearnerInterface.forget_demonstrations) for learner in self.fleet.learners])
        self.publish()

    def imitation(self) -> BehaviourCloning:
        """Return the demonstrations of the spec's `imitation:`, ready to train on."""
        section = self.spec.imitation
        assert section is not None
        if section.expert is None:
            return of_data(self.fleet, self.spec, self.demonstrations, "imitation", section.batch)
        self.progress("demonstrations", 0, section.expert.episodes)
        return of_expert(self.fleet, self.spec, section.expert, "imitation", section.batch)

    # ------------------------------------------------------------------------------------------- state and weights

    @property
    def tick(self) -> Callable[[], None]:
        """Function that is called from time to time while the driver waits for workers."""
        return self.backend.tick

    @tick.setter
    def tick(self, tick: Callable[[], None]) -> None:
        self.backend.tick = tick

    def devices(self) -> str:
        """Return a description of the device of each role."""
        return describe(
            self.fleet.assignments, self.fleet.get_all([w.call(HostInterface.device) for w in self.fleet.workers])
        )

    def how_far(self, phase: str, done: int, total: int) -> tuple[str, int, int]:
        """Return the progress of a phase, as `Runtime.how_far`."""
        return self.fleet.progress(self.spec, self.info, phase, done, total)

    @traced
    def publish(self) -> None:
        """Publish the weights. Policies in a learner's process already hold them; the others get them by reference.

        Where rollouts run ahead, only tickets that need the new version wait for it; otherwise this call waits.
        """
        self.tickets.arrive()
        self.tickets.publishing = self.fleet.publish(self.version, self.spec.runtime.check_weights)
        if not self.tickets.ahead:
            self.tickets.arrive()

    @traced
    def save(self, model_folder: Path, trainer_folder: Path) -> None:
        """Write the model in its public format, and the exact state from which a run resumes."""
        state = trainer_folder / "learner.pt"
        self.fleet.get_all(
            [learner.call(LearnerInterface.save, model_folder, state) for learner in self.fleet.learners]
        )
        self.starts.save(trainer_folder)
        self.imagining.save(trainer_folder)
        if self.shape.pinned_lag:
            self.fleet.get(self.fleet.policies[0].call(PolicyInterface.save_past, trainer_folder / "past.pt"))

    def load(self, trainer_folder: Path) -> None:
        """Restore what `save` wrote."""
        state = trainer_folder / "learner.pt"
        self.version = self.fleet.get_all([r.call(LearnerInterface.load, state) for r in self.fleet.learners])[0]
        self.starts.load(trainer_folder)
        self.imagining.load(trainer_folder)
        if self.supply.again:
            logger.warning("the replay buffer is no part of a checkpoint: it is empty, and fills anew")
        if self.shape.pinned_lag:
            past = trainer_folder / "past.pt"
            self.fleet.get_all([policy.call(PolicyInterface.load_past, past) for policy in self.fleet.policies])
        self.publish()

    def record(self, kind: str, step: int, env_steps: int, folder: Path, final: bool) -> None:
        """Fetch the workers' events and write the trace file. `env_steps`: environment steps of the run so far."""
        fleet, trace = self.fleet, self.trace
        if not trace.shifts:
            for worker in fleet.workers:
                trace.shifts[worker.worker] = clock_ahead(partial(self._clock_of, worker))
            trace.sizes = self._sizes()
        drained = fleet.get_all([worker.call(HostInterface.drain_trace) for worker in fleet.workers])
        trace.add(kind, step, env_steps, {w.worker: d for w, d in zip(fleet.workers, drained, strict=True)})
        trace.write(folder, final=final)

    def roles(self) -> dict[str, dict[str, Any]]:
        return self.trace.roles()

    def _sizes(self) -> dict[str, float]:
        """Return the sizes of the model, and of the longest trajectory unless learners may be offloaded."""
        sizes = self.fleet.get(self.fleet.worker_of(self.fleet.policies[0]).call(HostInterface.model_size))
        if self.plan.offload or not self.fleet.learners:
            return sizes
        return {**sizes, "trajectory_bytes": trajectory_bytes(self.spec, self.info, self._sample_bytes)}

    def _clock_of(self, worker: Handle[HostInterface]) -> tuple[str, float]:
        return self.fleet.get(worker.call(HostInterface.clock))

    def close(self) -> None:
        self.backend.close()

    # ------------------------------------------------------------------------------------------------------ inside

    def _start(self, imitation: bool, folder: Path | None) -> EnvInfo:
        fleet = self.fleet
        self.backend.start(self.spec, fleet.assignments)
        info = fleet.start_simulators(folder)
        if imitation:
            self._open_data(info)
        hosts = [worker for worker in fleet.workers if {"policy", "learner"} & set(worker.assignment.slot.roles)]
        fleet.get_all([worker.call(HostInterface.start_model, info, self.scaling) for worker in hosts])
        fleet.connect_policies([sim.worker for sim in fleet.sims])
        if len(fleet.learners) > 1:
            address = fleet.get(fleet.worker_of(fleet.learners[0]).call(HostInterface.rendezvous))
            fleet.get_all([r.call(LearnerInterface.join, address, r.assignment.rank) for r in fleet.learners])
        self.eval_states = fleet.get(fleet.sim_of[0].call(EnvInterface.eval_states))
        train_states = fleet.get(fleet.sim_of[0].call(EnvInterface.train_states))
        self.starts = EpisodeRequests(self.spec, train_states, self.algorithm.needs)
        return info

    def _open_data(self, info: EnvInfo) -> None:
        section = self.spec.imitation
        assert section is not None
        if section.data is None:
            return
        workers = [self.fleet.worker_of(learner) for learner in self.fleet.learners]
        self.demonstrations = min(
            self.fleet.get_all([worker.call(HostInterface.open_data, info) for worker in workers])
        )
        if section.statistics == "data" and self.scaling is None:
            self.scaling = self.fleet.get(workers[0].call(HostInterface.data_statistics))

    def _check_memory(self) -> None:
        """Check once, before the first ticket, that samples fit into memory where rollouts run ahead or are
        replayed.
        """
        if self.fits:
            return
        check_memory(self.spec, self.plan, self.backend.cluster(), self.info, self._sample_bytes)
        self.fits = True

    @cached_property
    def _sample_bytes(self) -> int:
        """Bytes of a chunk step's sample, as learners hold it."""
        return self.fleet.get(self.fleet.learners[0].call(LearnerInterface.sample_bytes))

    def _report_faults(self, texts: list[str]) -> None:
        """Report faults of envs in any worker, once each. Raises EnvError when there were too many."""
        for text in texts:
            self.on_fault(text)
        self.faults += len(texts)
        if self.faults > self.spec.runtime.max_faults:
            raise too_many_faults(self.faults, self.spec.runtime.max_faults, self.spec.env.type, texts[-1])
        texts.clear()
