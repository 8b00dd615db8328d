"""The driver's half of a rollout: which worker gets which tickets, and the results that came back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, TypeVar

from attrs import define, field

from vla_rl.core.errors import WorkerDied
from vla_rl.runtime.comm.backend import Ref
from vla_rl.runtime.comm.handles import Fleet, Handle
from vla_rl.runtime.comm.interfaces import HostInterface, PolicyInterface
from vla_rl.runtime.driver.restarts import Restarts
from vla_rl.runtime.messages.reports import RolloutReport, TrajectoryResult
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.messages.stream_cursors import StreamCursors
from vla_rl.runtime.scheduling.admission import most_held
from vla_rl.toolkit.waiting import waiting

T = TypeVar("T")


@define
class Collector:
    """Tickets of one purpose (rollout or imagination): waiting, given to workers, and finished."""

    fleet: Fleet
    restarts: Restarts
    ahead: bool
    """True where rollouts run ahead of training, so that reports are wanted while other tickets are still running."""
    each: bool = False
    """True where each finished ticket is wanted at once (streaming update)."""
    purpose: str = "action"
    """Purpose of the `PolicyMode` in which tickets are rolled out."""
    arrived: Callable[[int, Sequence[TrajectoryResult]], None] | None = None
    """Called at once with finished tickets and the worker of their policy, also while `get_all` waits."""
    played: dict[int, tuple[int, TrajectoryResult]] = field(factory=dict, init=False)
    """Ticket -> worker of its policy, and its result; until `release`."""
    since: RolloutReport = field(factory=RolloutReport, init=False)
    """Work done since `forget`; its `played` stays empty."""
    publishing: list[Ref[Any]] = field(factory=list, init=False)
    """Calls that publish weights, for which tickets may wait."""
    seconds: float = field(default=0.0, init=False)
    """Seconds that the driver waited since `forget`."""
    _standings: StreamCursors = field(factory=StreamCursors, init=False)
    _waiting: deque[deque[EpisodeRequest]] = field(factory=deque, init=False)
    """Tickets that no worker holds, in the batches in which they were issued."""
    _given: dict[int, dict[int, EpisodeRequest]] = field(init=False)
    """Worker -> tickets that it holds: running, or waiting there."""
    _acting_for: dict[int, int] = field(init=False)
    """Env (index in the run) -> worker of its policy."""
    _news: list[int] = field(factory=list, init=False)
    """Finished tickets that `finished` has not returned yet."""
    _plays: dict[int, Ref[RolloutReport]] = field(factory=dict, init=False)
    _reports: dict[int, Ref[RolloutReport]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._given = {policy.worker: {} for policy in self.fleet.policies}
        self._acting_for = {
            row: policy.worker
            for policy in self.fleet.policies
            for lane in policy.assignment.served
            for row in range(lane.first_env, lane.first_env + lane.num_envs)
        }

    def play(self, batches: Sequence[Sequence[EpisodeRequest]]) -> None:
        """Have these tickets rolled out, earlier batches first. Does not wait."""
        before = perf_counter()
        self._waiting.extend(deque(batch) for batch in batches if batch)
        self._hand_out()
        self.seconds += perf_counter() - before  # with the local backend the rollout runs within this call

    def finished(self, needed: Collection[int]) -> list[int]:
        """Wait until some tickets are finished, if possible all that are needed. Return the finished tickets."""
        before = perf_counter()
        while not self._news:
            try:
                self._wait(needed)
            except WorkerDied as exc:
                self._recover(exc)
            self._hand_out()
        self.seconds += perf_counter() - before
        news, self._news = self._news, []
        return news

    def metrics(self, taken: int) -> dict[str, float]:
        """Return the time waited; where rollouts run ahead, also the number of tickets beyond the step, which took
        `taken` of them.
        """
        waited = {"time/rollout": self.seconds}
        if not self.ahead:
            return waited
        ready, playing = len(self.played) - taken, sum(map(len, (*self._given.values(), *self._waiting)))
        return {**waited, "rollout/ready_tickets": float(ready), "rollout/running_tickets": float(playing)}

    def get_all(self, references: Sequence[Ref[T]]) -> list[T]:
        """Wait for results, as the fleet does; finished tickets are passed to `arrived` meanwhile."""
        left = list(references) if self.arrived else []
        while left and (self._plays or self._reports):
            try:
                self._wait((), left)
            except WorkerDied as exc:
                self._recover(exc)
            self._hand_out()
        return self.fleet.get_all(references)

    def arrive(self) -> None:
        """Wait until all policies have the version that was published last."""
        publishing, self.publishing = self.publishing, []
        with waiting("publishing weights"):
            self.fleet.get_all(publishing)

    def forget(self) -> None:
        """Reset the counts."""
        self.since, self.seconds = RolloutReport(), 0.0

    def release(self, numbers: Sequence[int]) -> None:
        """Drop the results of these tickets, here and in the policies' workers."""
        for number in numbers:
            del self.played[number]
        self.fleet.get_all([policy.call(PolicyInterface.release, numbers) for policy in self.fleet.policies])

    # ------------------------------------------------------------------------------------------------------ inside

    def _hand_out(self) -> None:
        """Give tickets to the worker that holds the fewest for each of its envs; tickets of streams go to the worker of
        their env.
        """
        rows = {p.worker: p.assignment.envs_served for p in self.fleet.policies}
        most = {worker: most_held(count, len(rows) > 1, self.ahead) for worker, count in rows.items()}
        held = {worker: len(given) for worker, given in self._given.items()}
        coming: dict[int, list[list[EpisodeRequest]]] = {worker: [] for worker in rows}
        while self._waiting and any(held[worker] < most[worker] for worker in rows):
            batch, parts = self._waiting[0], {worker: list[EpisodeRequest]() for worker in rows}
            while batch and any(held[worker] < most[worker] for worker in rows):
                start = batch.popleft()
                worker = min(rows, key=lambda worker: held[worker] / rows[worker])
                if start.env_id is not None:
                    worker = self._acting_for[start.env_id]
                parts[worker].append(start)
                held[worker] += 1
            for worker, part in parts.items():
                coming[worker] += [part] if part else []
            if not batch:
                self._waiting.popleft()
        for worker, batches in coming.items():
            if batches:
                self._give(self.fleet.workers[worker], batches)

    def _give(self, worker: Handle[HostInterface], batches: list[list[EpisodeRequest]]) -> None:
        index = worker.worker
        self._given[index] |= {start.number: start for batch in batches for start in batch}
        if index in self._plays:
            if self.fleet.get(worker.call(HostInterface.add_tickets, self._placed(batches), self.purpose)):
                return
            self._take_in(index, self.fleet.get(self._plays.pop(index)))
        play = HostInterface.roll_out if self.purpose == "action" else HostInterface.imagine
        self._plays[index] = worker.call(play, self._placed(batches))

    def _placed(self, batches: list[list[EpisodeRequest]]) -> list[list[EpisodeRequest]]:
        return [[self._standings.placed(start) for start in batch] for batch in batches]

    def _wait(self, needed: Collection[int], others: list[Ref[Any]] | None = None) -> None:
        """Wait until there is news of tickets, or one of `others` is there, which is removed from the list then."""
        others = [] if others is None else others
        assert self._plays or self._reports, f"tickets {list(needed)[:5]} are waited for, and nobody plays"
        wanted, early = frozenset(needed), bool(self._waiting or self.arrived or self.each)
        for index in self._plays:
            own = [number for number in self._given[index] if number in wanted]
            if index not in self._reports and (early or (self.ahead and own)):
                worker = self.fleet.workers[index]
                self._reports[index] = worker.call(HostInterface.wait_for_report, own, early, self.purpose)
        expected = [*self._plays.values(), *self._reports.values(), *self.publishing, *others]
        there = {id(r) for r in self.fleet.backend.ready(expected)}
        for further in (self.publishing, others):
            for reference in [reference for reference in further if id(reference) in there]:
                further.remove(reference)
                self.fleet.get(reference)
        for pending in (self._reports, self._plays):
            for index in [index for index, reference in pending.items() if id(reference) in there]:
                report = self.fleet.get(pending[index])
                del pending[index]
                self._take_in(index, report)

    def _take_in(self, worker: int, report: RolloutReport) -> None:
        for ticket in report.played:
            number = ticket.finished.number
            self.played[number] = worker, ticket
            self._standings.note(ticket.finished)
            del self._given[worker][number]
            self._news.append(number)
        if report.played and self.arrived:
            self.arrived(worker, report.played)
        self.since.add(report)

    def _recover(self, error: WorkerDied) -> None:
        """Start dead sim workers again, and queue the running tickets of the policies that act for them. Raises the
        error where another kind of worker died.
        """
        dead = self.restarts.revive(error)
        for policy in self.fleet.policies:
            index = policy.worker
            if index not in self._plays or not dead & set(policy.assignment.sim_workers):
                continue
            for pending in (self._plays, self._reports):
                if index in pending:
                    with suppress(WorkerDied):
                        self._take_in(index, self.fleet.get(pending.pop(index)))
            worker = self.fleet.workers[index]
            self._take_in(index, self.fleet.get(worker.call(HostInterface.wait_for_report, (), False, self.purpose)))
            lost, self._given[index] = self._given[index], {}
            self.fleet.get(policy.call(PolicyInterface.release, list(lost)))
            self._waiting.appendleft(deque(lost.values()))
        self.fleet.connect_policies(dead)
