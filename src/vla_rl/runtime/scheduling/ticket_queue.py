"""Tickets of policy workers: which worker gets which, the queue of each, and the report of what it has finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from threading import Condition

from vla_rl.runtime.messages.reports import RolloutReport
from vla_rl.runtime.messages.requests import EpisodeRequest, StreamCursors
from vla_rl.runtime.placement.assignments import LaneSlice
from vla_rl.runtime.scheduling.batching import Lane

Batches = list[list[EpisodeRequest]]
"""Tickets in the batches in which they were issued."""

HELD = 2
"""Tickets that a worker holds for each env if there are several workers; others can go to another worker."""
LOOK_S = 0.5
"""Seconds between two checks of whether to stop, where no ticket may start yet."""


def distribute_tickets(
    queue: deque[deque[EpisodeRequest]],
    *,
    held: Mapping[int, int],
    envs: Mapping[int, int],
    policy_of_env: Mapping[int, int],
    runs_ahead: bool,
) -> dict[int, Batches]:
    """Remove tickets from the queue and give each to the worker that holds the fewest for each of its envs; tickets of
    a persistent stream go to the worker of their env. Return worker -> its new tickets.

    Args:
        queue: tickets that no worker holds, in the batches in which they were issued.
        held: worker -> number of tickets that it holds.
        envs: worker -> number of envs that it acts for.
        policy_of_env: env (index in the run) -> worker of its policy.
        runs_ahead: rollouts run ahead of training, so workers may hold any number of tickets.
    """
    counts = dict(held)
    # No limit where rollouts run ahead of training: the driver may be waiting for learners when an env becomes free.
    most_held = HELD if len(envs) > 1 and not runs_ahead else float("inf")
    assigned: dict[int, Batches] = {worker: [] for worker in envs}

    def has_room() -> bool:
        return any(counts[worker] < most_held * envs[worker] for worker in envs)

    while queue and has_room():
        batch = queue[0]
        shares = {worker: list[EpisodeRequest]() for worker in envs}
        while batch and has_room():
            request = batch.popleft()
            if request.env_id is None:
                worker = min(envs, key=lambda worker: counts[worker] / envs[worker])
            else:
                worker = policy_of_env[request.env_id]
            shares[worker].append(request)
            counts[worker] += 1
        for worker, share in shares.items():
            if share:
                assigned[worker].append(share)
        if not batch:
            queue.popleft()
    return {worker: batches for worker, batches in assigned.items() if batches}


class _Batch:
    """Tickets that were given together, by task."""

    def __init__(self, requests: Iterable[EpisodeRequest]):
        self.by_task: dict[str, deque[EpisodeRequest]] = {}
        for request in requests:
            self.by_task.setdefault(request.state.task, deque()).append(request)

    def pop_ticket(self, tasks: Collection[str]) -> EpisodeRequest:
        """Remove and return the next ticket of one of these tasks; else of the task with the most tickets left."""
        task = next((task for task in tasks if task in self.by_task), None)
        if task is None:
            task = max(self.by_task, key=lambda name: len(self.by_task[name]))
        request = self.by_task[task].popleft()
        if not self.by_task[task]:
            del self.by_task[task]
        return request


class TicketQueue:
    """Queue of the tickets of one worker. One thread rolls them out; others add tickets and ask for reports. `_changed`
    guards all state. No other lock is acquired under it, so it may be acquired under any of a worker."""

    def __init__(self, lanes: Sequence[LaneSlice], batches: Iterable[Sequence[EpisodeRequest]] = ()) -> None:
        """Create a queue that starts with `batches`, if any."""
        self.lanes = len(lanes)
        self.running = False
        self.begun = 0
        """Number of rollouts that have begun, so the number of the running or last one."""
        self._early: list[Sequence[EpisodeRequest]] = []
        """Tickets of the next rollout, which has not begun."""
        self._changed = Condition()
        self._batches: deque[_Batch] = deque()
        """Tickets that any env may take."""
        self._left = 0
        """Tickets that no lane has taken."""
        self._loaded_tasks: dict[int, deque[str]] = {}
        """Lane -> its envs' last tasks in this rollout, which are preferred: another scene can take seconds."""
        self._lane_of_env = {
            env: lane.index for lane in lanes for env in range(lane.first_env, lane.first_env + lane.num_envs)
        }
        self._stream_tickets: dict[int, list[EpisodeRequest]] = {}
        """Lane -> tickets of its envs' streams."""
        self._blocked: list[list[EpisodeRequest]] = []
        """Tickets that wait for the end of the ticket that they continue, or for a version of the weights."""
        self._version = 0
        self._cursors = StreamCursors()
        self._report = RolloutReport()
        self._done: set[int] = set()
        """Numbers of the tickets in the report."""
        if batches:
            self.begin_rollout(batches)

    # ------------------------------------------------------------------------------------- by whoever gives tickets

    def begin_rollout(self, batches: Iterable[Sequence[EpisodeRequest]]) -> None:
        """Start a rollout with these tickets; call it before the first one is taken."""
        with self._changed:
            self.running = True
            self.begun += 1
            self._loaded_tasks.clear()  # a run that was resumed has no earlier rollouts, and must order tickets alike
            self._queue_batches([*batches, *self._early])
            self._early = []

    def add_tickets(self, batches: Iterable[Sequence[EpisodeRequest]], rollout: int) -> bool:
        """Add tickets to the rollout of this number (from 1); they wait where it has not begun. Return whether they
        will be rolled out; False means that it has ended and another one has to begin."""
        with self._changed:
            if rollout > self.begun:
                self._early += batches
                return True
            if self.running:
                self._queue_batches(batches)
            return self.running

    def wait_for_report(self, needed: Collection[int], early: bool, rollout: int) -> RolloutReport:
        """Wait until all these tickets are finished (`early`: any), or the rollout ended. Return what is new."""
        with self._changed:
            while self.begun < rollout or (
                self.running and not (self._done if early else self._done.issuperset(needed))
            ):
                self._changed.wait()
            report = self._report
            self._report = RolloutReport()
            self._done.clear()
            return report

    def reach_version(self, version: int) -> None:
        """Take note that the policy has this version of the weights now; tickets that waited for it may start."""
        with self._changed:
            self._version = version
            self._unblock_tickets()

    def _queue_batches(self, batches: Iterable[Sequence[EpisodeRequest]]) -> None:
        for requests in batches:
            self._left += len(requests)
            self._blocked.append(list(requests))
        self._unblock_tickets()

    def _unblock_tickets(self) -> None:
        """Move those of the blocked tickets that may start to the queues of their lanes or tasks."""
        blocked = self._blocked
        self._blocked = []
        for requests in blocked:
            for_any_env = []
            still_blocked = []
            for request in map(self._cursors.with_position, requests):
                lacks_cursor = request.env_id is not None and request.actions is None
                if request.least > self._version or lacks_cursor:
                    still_blocked.append(request)
                elif request.env_id is None:
                    for_any_env.append(request)
                else:
                    self._stream_tickets.setdefault(self._lane_of_env[request.env_id], []).append(request)
            if for_any_env:
                self._batches.append(_Batch(for_any_env))
            if still_blocked:
                self._blocked.append(still_blocked)
        self._changed.notify_all()

    # -------------------------------------------------------------------------------------------- by whoever rolls out

    def take_tickets(self, lane: Lane, free: int, ending: int, waiting: int) -> list[EpisodeRequest]:
        """Return tickets for a lane: for its envs that are free or will be after their next chunk, and a few more for
        envs that end early, fewer towards the end. Tickets of streams go to the lanes that have their envs."""
        with self._changed:
            # A waiting ticket cannot move to another lane, so a lane takes half of its share of those that are left.
            spare = self._left if self.lanes == 1 else (self._left - free) // (2 * self.lanes)
            needed = free + max(ending, min(lane.slice.num_envs - free, spare)) - waiting
            loaded_tasks = self._loaded_tasks.setdefault(lane.slice.index, deque(maxlen=lane.slice.num_envs))
            tickets = self._stream_tickets.pop(lane.slice.index, [])
            self._left -= len(tickets)
            while len(tickets) < needed and self._batches:
                request = self._batches[0].pop_ticket(loaded_tasks)
                tickets.append(request)
                loaded_tasks.append(request.state.task)
                self._left -= 1
                if not self._batches[0].by_task:
                    self._batches.popleft()
            return tickets

    def add_report(self, work: RolloutReport) -> None:
        """Add finished tickets, and the work done, to the report."""
        with self._changed:
            self._report.collected += work.collected
            self._report.add_work(work)
            self._done.update(trajectory.env_part.number for trajectory in work.collected)
            for trajectory in work.collected:
                self._cursors.note_ticket(trajectory.env_part)
            if work.collected:
                self._unblock_tickets()

    def end_if_empty(self) -> bool:
        """End the rollout and return True if nothing is left; else False, after a short wait if no ticket may start."""
        with self._changed:
            if self._left:
                self._changed.wait_for(lambda: self._stream_tickets or self._batches, LOOK_S)
                return False
            self.end_rollout()
            return True

    def end_rollout(self) -> None:
        """End the rollout and drop the tickets that are left."""
        with self._changed:
            self.running = False
            self._left = 0
            self._blocked = []
            self._batches.clear()
            self._stream_tickets.clear()
            self._changed.notify_all()
