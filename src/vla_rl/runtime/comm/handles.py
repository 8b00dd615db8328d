"""The workers of a run, as the driver speaks to them: typed handles in place of names.

`fleet.policies[0].call(PolicyInterface.take, samples)` is checked like a call of the method itself; `Ref[T]` is a T
that may still be on its way in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from attrs import frozen

from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.comm.backend import Backend, Ref
from vla_rl.runtime.comm.interfaces import EnvInterface, HostInterface, LearnerInterface, PolicyInterface
from vla_rl.runtime.comm.remote import Door, Phase, declared
from vla_rl.runtime.comm.weight_sync import PublishedWeights
from vla_rl.runtime.placement.assignments import Assignment
from vla_rl.toolkit.waiting import summed

Host = TypeVar("Host")
P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")


def by_reference(reference: Ref[T]) -> T:
    """For an argument of another call: its value goes there directly, not through the driver."""
    return cast(T, reference)


@frozen(eq=False)
class Handle(Generic[Host]):
    """One role of one worker, or the worker itself."""

    fleet: Fleet
    role: str
    """ "sim", "policy", "learner" or "worker"."""
    assignment: Assignment

    @property
    def worker(self) -> int:
        return self.assignment.index

    def call(self, method: Callable[Concatenate[Host, P], T], *args: P.args, **kwargs: P.kwargs) -> Ref[T]:
        """Ask for a call of `method`, which is declared with `@remote`. Workers answer in the order in which they are
        asked, but for methods that go on beside others."""
        assert not kwargs, "arguments of remote calls are positional"
        return cast(Ref[T], self.fleet.send(self, method, args, 1))

    def call_for_two(
        self, method: Callable[Concatenate[Host, P], tuple[T, U]], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Ref[T], Ref[U]]:
        """As `call`, with a reference for each of the two results."""
        assert not kwargs, "arguments of remote calls are positional"
        first, second = self.fleet.send(self, method, args, 2)
        return first, second


class Phases:
    """Which phase it is, and what changing it cost (`roles/offload.py` is the workers' part)."""

    def __init__(self, offload: frozenset[str], workers: Sequence[Handle[HostInterface]], get_all: Any):
        self.offload, self.get_all = offload, get_all
        self.moving = [worker for worker in workers if offload & set(worker.assignment.slot.roles)]
        self.now: Phase | None = None
        self.seconds, self.freed = 0.0, 0

    def enter(self, phase: Phase | None) -> None:
        """Let all workers free what the phase does not need and bring back what it does. None: any phase will do."""
        if phase in (None, self.now) or not self.moving:
            return
        before = perf_counter()
        self.freed += sum(self.get_all([worker.call(HostInterface.leave, phase) for worker in self.moving]))
        self.get_all([worker.call(HostInterface.come_back, phase) for worker in self.moving])
        self.now = phase  # only now: where a worker died, all of it is done again
        self.seconds += perf_counter() - before

    def metrics(self) -> dict[str, float]:
        """Since the last time; nothing without offload."""
        if not self.moving:
            return {}
        found = {"time/offload": self.seconds, "offload/freed_mib": self.freed / 2**20}
        self.seconds, self.freed = 0.0, 0
        return found


class Fleet:
    def __init__(self, backend: Backend, assignments: Sequence[Assignment], offload: frozenset[str]):
        self.backend, self.assignments = backend, tuple(assignments)
        self.workers = [Handle[HostInterface](self, "worker", assignment) for assignment in assignments]
        self.sims = [Handle[EnvInterface](self, "sim", a) for a in assignments if a.lanes]
        self.policies = [Handle[PolicyInterface](self, "policy", a) for a in assignments if a.served]
        ranked = sorted((a for a in assignments if a.rank >= 0), key=lambda a: a.rank)
        self.learners = [Handle[LearnerInterface](self, "learner", assignment) for assignment in ranked]
        """By rank."""
        self.lanes = sorted((lane for a in assignments for lane in a.lanes), key=lambda lane: lane.index)
        self.sim_of = {lane.index: sim for sim in self.sims for lane in sim.assignment.lanes}
        """Lane -> the sim role that hosts it."""
        self.policy_of = {lane.index: policy for policy in self.policies for lane in policy.assignment.served}
        """Lane -> the policy that acts for it."""
        self.phases = Phases(offload, self.workers, self.get_all)

    def send(self, handle: Handle[Any], method: Callable[..., Any], arguments: Sequence[Any], returns: int) -> Any:
        about = declared(method)
        self.phases.enter(about.phase)
        beside = handle.role == "sim" and about.lane is not None and handle.assignment.side_by_side
        door: Door = "lane" if beside else about.door
        return self.backend.call(handle.worker, handle.role, method.__name__, *arguments, returns=returns, door=door)

    def get(self, reference: Ref[T]) -> T:
        """Wait for a result. Raises what the call raised, WorkerDied, or CallHung."""
        return self.backend.get(reference)

    def get_all(self, references: Sequence[Ref[T]]) -> list[T]:
        """Wait for all; the first error is raised even if others never return."""
        return self.backend.get_all(references)

    def worker_of(self, handle: Handle[Any]) -> Handle[HostInterface]:
        """The worker of a role."""
        return self.workers[handle.worker]

    def start_simulators(self, folder: Path | None) -> EnvInfo:
        """As `HostInterface.start_sim`; the world model is with the first ones, and has rows for all lanes."""
        rows = {lane.index: lane.rows for lane in self.lanes}
        workers = [self.worker_of(sim) for sim in self.sims]
        calls = [w.call(HostInterface.start_sim, folder, None if i else rows) for i, w in enumerate(workers)]
        return self.get_all(calls)[0]

    def introduce(self, workers: Collection[int]) -> None:
        """Let every policy's worker call those simulators that it acts for, if any of these workers has some of
        them."""
        assignments = [policy.assignment for policy in self.policies]
        acting = [a for a in assignments if set(a.peers) & set(workers)]
        self.get_all([self.backend.introduce(a.index, a.peers) for a in acting])

    def publish(self, version: int, check: bool) -> list[Ref[Any]]:
        """Give all policies the learners' version, with checksums if asked for. Those beside a learner hold the weights
        already. Does not wait: learners go on when it is copied, and policies take it between two requests."""
        beside = {learner.worker for learner in self.learners}
        apart = [policy for policy in self.policies if policy.worker not in beside]
        sending = [learner.call(LearnerInterface.weights, check) for learner in self.learners] if apart else []
        loading = [
            policy.call(PolicyInterface.load, version, cast(PublishedWeights, by_reference(sending[0])))
            for policy in apart
        ]
        adopting = [policy.call(PolicyInterface.adopt, version) for policy in self.policies if policy.worker in beside]
        return [*sending[1:], *loading, *adopting]

    def skip(self, version: int) -> None:
        """A version whose weights are those of the one before."""
        learners = [learner.call(LearnerInterface.skip) for learner in self.learners]
        self.get_all([*learners, *(policy.call(PolicyInterface.adopt, version) for policy in self.policies)])

    def how_far(self, spec: Spec, info: EnvInfo, phase: str, done: int, total: int) -> tuple[str, int, int]:
        """What a phase waits for, if that takes long, or the phase, and (done, total) of it: chunk steps of a rollout,
        episodes of an evaluation or of the scripted expert; of other phases what they have told."""
        played = self.backend.played([worker.worker for worker in self.workers])
        if work := summed(played.works):
            return work.title, work.done, work.total
        if phase != "rollout":
            done = {"demonstrations": played.solved, "eval": played.tickets}.get(phase, done)
            return phase, min(done, total), total
        section, tickets = spec.rollout, spec.rollout.episodes or spec.env.num_envs
        limit = section.steps or section.max_steps or max(task.max_steps for task in info.tasks)
        steps = -(-limit // section.chunk)
        return phase, min(played.tickets * steps + played.steps, tickets * steps), tickets * steps
