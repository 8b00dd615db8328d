"""Typed handles for the driver's calls to the workers of a run. `fleet.policies[0].call(PolicyInterface.take_samples,
samples)` is type-checked like a call of the method itself. `Ref[T]` is a T that may still be on its way in another
process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from attrs import frozen

from vla_rl.core.errors import WorkerDied
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Array, EnvInfo
from vla_rl.runtime.comm.backend import Backend, Ref
from vla_rl.runtime.comm.interfaces import (
    EnvInterface,
    HostInterface,
    LearnerInterface,
    PolicyInterface,
    RolloutInterface,
)
from vla_rl.runtime.comm.remote import ConcurrencyGroup, Phase, read_declaration
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.toolkit.waiting import merge_works

Host = TypeVar("Host")
P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")


def by_reference(reference: Ref[T]) -> T:
    """Return the reference, typed as its value, as an argument of a call: the value goes there, not through here."""
    return cast(T, reference)


@frozen(eq=False)
class Handle(Generic[Host]):
    """Handle of one role of one worker, or of the worker itself."""

    fleet: Fleet
    role: str
    """ "sim", "policy", "learner" or "worker"."""
    assignment: Assignment

    @property
    def worker_index(self) -> int:
        return self.assignment.index

    def call(self, method: Callable[Concatenate[Host, P], T], *args: P.args, **kwargs: P.kwargs) -> Ref[T]:
        """Call a `@remote` method. A worker's calls run in the order of sending, within each concurrency group."""
        assert not kwargs, "arguments of remote calls are positional"
        return cast(Ref[T], self.fleet.send_call(self, method, args, 1))

    def call_for_two(
        self, method: Callable[Concatenate[Host, P], tuple[T, U]], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Ref[T], Ref[U]]:
        """Call a method with two results, as `call` does. Return a reference to each of them."""
        assert not kwargs, "arguments of remote calls are positional"
        first, second = self.fleet.send_call(self, method, args, 2)
        return first, second


class Phases:
    """The run's phase (`act` or `learn`), and the cost of changing it. `workers/offload.py` is the workers' half."""

    def __init__(self, offload: frozenset[str], workers: Sequence[Handle[HostInterface]], get_from_living: Any):
        self.offload = offload
        self.get_from_living = get_from_living
        self.moving = [worker for worker in workers if offload & set(worker.assignment.slot.roles)]
        self.now: Phase | None = None
        self.seconds = 0.0
        self.freed = 0

    def enter_phase(self, phase: Phase | None) -> None:
        """Let all workers free what the phase does not need, then restore what it needs. None: any phase."""
        if phase in (None, self.now) or not self.moving:
            return
        before = perf_counter()
        freed = self.get_from_living([worker.call(HostInterface.offload_for, phase) for worker in self.moving])
        self.freed += sum(filter(None, freed))
        self.get_from_living([worker.call(HostInterface.reload_for, phase) for worker in self.moving])
        self.now = phase  # set last: if a call raises before, all of it is repeated
        self.seconds += perf_counter() - before

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call; empty without offload."""
        if not self.moving:
            return {}
        metrics = {"time/offload": self.seconds, "offload/freed_mib": self.freed / 2**20}
        self.seconds = 0.0
        self.freed = 0
        return metrics


class Fleet:
    """All workers of a run with their roles, as typed handles."""

    def __init__(self, backend: Backend, assignments: Sequence[Assignment], offload: frozenset[str]):
        self.backend = backend
        self.assignments = tuple(assignments)
        self.workers = [Handle[HostInterface](self, "worker", assignment) for assignment in assignments]
        self.sims = [Handle[EnvInterface](self, "sim", a) for a in assignments if a.lanes]
        self.policies = [Handle[PolicyInterface](self, "policy", a) for a in assignments if a.served]
        self.rollouts = {p.worker_index: Handle[RolloutInterface](self, "rollout", p.assignment) for p in self.policies}
        """Worker with a policy -> handle of its rollouts."""
        ranked = sorted((a for a in assignments if a.rank >= 0), key=lambda a: a.rank)
        self.learners = [Handle[LearnerInterface](self, "learner", assignment) for assignment in ranked]
        """Learners, sorted by rank."""
        self.lanes = sorted((lane for a in assignments for lane in a.lanes), key=lambda lane: lane.index)
        self.sim_of = {lane.index: sim for sim in self.sims for lane in sim.assignment.lanes}
        """Lane -> handle of the sim role that hosts it."""
        learner_workers = {learner.worker_index for learner in self.learners}
        self.remote_policies = [policy for policy in self.policies if policy.worker_index not in learner_workers]
        """Policies that share no worker with a learner, so that weights have to reach them."""
        self.version = 0
        """Version of the weights that was published last: the number of finished training steps."""
        self.through_store = False
        """True where weights reach them through the object store."""
        self.phases = Phases(offload, self.workers, self.get_from_living)

    def send_call(self, handle: Handle[Any], method: Callable[..., Any], arguments: Sequence[Any], returns: int) -> Any:
        """Call a method of a handle's role, in the phase and the concurrency group that the method declares."""
        declaration = read_declaration(method)
        self.phases.enter_phase(declaration.phase)
        in_lane = handle.role == "sim" and declaration.lane is not None and handle.assignment.concurrent_lanes
        group: ConcurrencyGroup = "lane" if in_lane else declaration.group
        return self.backend.call_worker(
            handle.worker_index, handle.role, method.__name__, *arguments, returns=returns, group=group
        )

    def get(self, reference: Ref[T]) -> T:
        """Wait for a result. Raises what the call raised, WorkerDied, or CallHung."""
        return self.backend.get(reference)

    def get_all(self, references: Sequence[Ref[T]]) -> list[T]:
        """Wait for all results. The first error is raised even if others never return."""
        return self.backend.get_all(references)

    def get_from_living(self, references: Sequence[Ref[T]]) -> list[T | None]:
        """Wait for all results; None stands for that of a worker that has died. For calls between rollouts and updates:
        the next of these, which needs the worker, starts it again or ends the run."""

        def get_if_alive(reference: Ref[T]) -> T | None:
            try:
                return self.backend.get(reference)
            except WorkerDied:
                return None

        return [get_if_alive(reference) for reference in references]

    def worker_of(self, handle: Handle[Any]) -> Handle[HostInterface]:
        """Return the handle of the worker that hosts a role."""
        return self.workers[handle.worker_index]

    def connect_policies(self, workers: Collection[int]) -> None:
        """Connect policy workers to their simulators: those with a simulator in `workers`."""
        assignments = [policy.assignment for policy in self.policies]
        acting = [a for a in assignments if set(a.peer_workers) & set(workers)]
        self.get_all([self.backend.connect_worker(a.index, a.peer_workers) for a in acting])

    def publish_weights(self, version: int, check: bool) -> list[Ref[Any]]:
        """Publish the learners' weights as this version, with checksums if `check`. Policies in a learner's process
        hold them already. Does not wait: policies load between two requests."""
        self.version = version
        calls: list[Ref[Any]] = []
        if self.remote_policies:
            sending = [learner.call_for_two(LearnerInterface.send_weights, check) for learner in self.learners]
            memory, checksums = sending[0]
            loaded = cast(Array, by_reference(memory)) if self.through_store else None
            calls = [checksums for _, checksums in sending]
            calls += [policy.call(PolicyInterface.load, version, loaded) for policy in self.remote_policies]
            if check:
                known = by_reference(checksums)
                calls += [
                    policy.call(PolicyInterface.verify_weights, version, known) for policy in self.remote_policies
                ]
        collocated = [policy for policy in self.policies if policy not in self.remote_policies]
        return [*calls, *(policy.call(PolicyInterface.adopt_version, version) for policy in collocated)]

    def skip_version(self, version: int) -> None:
        """Count a version whose weights equal those of the version before."""
        self.version = version
        self.get_all([policy.call(PolicyInterface.adopt_version, version) for policy in self.policies])

    def describe_progress(self, spec: Spec, info: EnvInfo, phase: str, done: int, total: int) -> tuple[str, int, int]:
        """Return (title, done, total) of what the run is doing. That is other work that takes long (loading the model,
        say), or else the phase: chunk steps of a rollout, episodes of an evaluation or of the scripted expert, and for
        other phases `done` and `total` as given."""
        collected = self.backend.read_progress([worker.worker_index for worker in self.workers])
        if work := merge_works(collected.works):
            return work.title, work.done, work.total
        if phase != "rollout":
            done = {"demonstrations": collected.solved, "eval": collected.tickets}.get(phase, done)
            return phase, min(done, total), total
        section, tickets = spec.rollout, spec.rollout.episodes or spec.env.num_envs
        limit = section.steps or section.max_steps or max(task.max_steps for task in info.tasks)
        steps = -(-limit // section.chunk)
        return phase, min(collected.tickets * steps + collected.steps, tickets * steps), tickets * steps
