"""Queue of the tickets that a policy's worker has to roll out, and the report of what it has finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from threading import Condition

from vla_rl.runtime.messages.reports import RolloutReport
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.messages.stream_cursors import StreamCursors
from vla_rl.runtime.placement.assignments import LaneSlice
from vla_rl.runtime.scheduling.batching import Lane

LOOK_S = 0.5
"""Seconds between two checks of whether to stop, where no ticket may start yet."""


class _Batch:
    """Tickets that were given together, by task."""

    def __init__(self, starts: Iterable[EpisodeRequest]):
        self.of_task: dict[str, deque[EpisodeRequest]] = {}
        for start in starts:
            self.of_task.setdefault(start.state.task, deque()).append(start)

    def pop(self, tasks: Collection[str]) -> EpisodeRequest:
        """Remove and return the next ticket of one of these tasks; if there is none, of the task with the most tickets
        left.
        """
        task = next((task for task in tasks if task in self.of_task), None)
        if task is None:
            task = max(self.of_task, key=lambda name: len(self.of_task[name]))
        start = self.of_task[task].popleft()
        if not self.of_task[task]:
            del self.of_task[task]
        return start


class TicketQueue:
    """Queue of the tickets of one worker. One thread rolls them out; others add tickets and ask for reports.

    All state is guarded by the condition `_changed`. No other lock is acquired while it is held, so it may be acquired
    while any other lock of a worker is held.
    """

    def __init__(self, lanes: Sequence[LaneSlice], batches: Iterable[Sequence[EpisodeRequest]] = ()) -> None:
        """Create a queue that starts with `batches`, if there are any."""
        self.lanes = len(lanes)
        self.going = False
        self._changed = Condition()
        self._batches: deque[_Batch] = deque()
        self._left = 0
        self._held: dict[int, deque[str]] = {}
        """Lane -> tasks that its envs got last. Tickets of the same task are preferred: many simulators need seconds to
        build the scene of another one.
        """
        self._lane_of = {
            env_id: lane.index for lane in lanes for env_id in range(lane.first_env, lane.first_env + lane.num_envs)
        }
        self._own: dict[int, list[EpisodeRequest]] = {}
        """Lane -> tickets of its envs' streams."""
        self._later: list[list[EpisodeRequest]] = []
        """Tickets that wait for the end of the ticket that they continue, or for a version of the weights."""
        self._version = 0
        self._standings = StreamCursors()
        self._report = RolloutReport()
        self._done: set[int] = set()
        """Numbers of the tickets in the report."""
        if batches:
            self.begin(batches)

    # ------------------------------------------------------------------------------------- by whoever gives tickets

    def begin(self, batches: Iterable[Sequence[EpisodeRequest]]) -> None:
        """Start a rollout with these tickets; call it before the first one is taken."""
        with self._changed:
            self.going = True
            self._add(batches)

    def give(self, batches: Iterable[Sequence[EpisodeRequest]]) -> bool:
        """Add tickets. Return whether they will be rolled out; False means that the rollout has ended and has to begin
        again.
        """
        with self._changed:
            if self.going:
                self._add(batches)
            return self.going

    def report(self, needed: Collection[int], early: bool) -> RolloutReport:
        """Wait until all these tickets are finished (`early`: one of all), or the rollout has ended. Return what was
        not reported before.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self.going or (self._done if early else self._done.issuperset(needed)))
            found, self._report = self._report, RolloutReport()
            self._done.clear()
            return found

    def reach(self, version: int) -> None:
        """Take note that the policy has this version of the weights now; tickets that waited for it may start."""
        with self._changed:
            self._version = version
            self._place()

    def _add(self, batches: Iterable[Sequence[EpisodeRequest]]) -> None:
        for starts in batches:
            self._left += len(starts)
            self._later.append(list(starts))
        self._place()

    def _place(self) -> None:
        """Move those of the waiting tickets that may start to the queues of their lanes or tasks."""
        later, self._later = self._later, []
        for starts in later:
            anywhere, waiting = [], []
            for start in map(self._standings.placed, starts):
                if start.least > self._version or (start.env_id is not None and start.actions is None):
                    waiting.append(start)
                elif start.env_id is None:
                    anywhere.append(start)
                else:
                    self._own.setdefault(self._lane_of[start.env_id], []).append(start)
            if anywhere:
                self._batches.append(_Batch(anywhere))
            if waiting:
                self._later.append(waiting)
        self._changed.notify_all()

    # -------------------------------------------------------------------------------------------- by whoever plays

    def tickets(self, lane: Lane, free: int, ending: int, waiting: int) -> list[EpisodeRequest]:
        """Return tickets for a lane.

        They are for envs that are free or will be after their next chunk, and a few wait in the lane for envs that end
        early. The fewer tickets are left, the fewer wait, so that no lane holds what another could roll out. Tickets of
        streams go to the lanes that have their envs.
        """
        with self._changed:
            spare = self._left if self.lanes == 1 else (self._left - free) // (2 * self.lanes)
            want = free + max(ending, min(lane.slice.num_envs - free, spare)) - waiting
            held = self._held.setdefault(lane.slice.index, deque(maxlen=lane.slice.num_envs))
            found = self._own.pop(lane.slice.index, [])
            self._left -= len(found)
            while len(found) < want and self._batches:
                start = self._batches[0].pop(held)
                found.append(start)
                held.append(start.state.task)
                self._left -= 1
                if not self._batches[0].of_task:
                    self._batches.popleft()
            return found

    def add(self, done: RolloutReport) -> None:
        """Add finished tickets, and the work done, to the report."""
        with self._changed:
            self._report.played += done.played
            self._report.add(done)
            self._done.update(ticket.finished.number for ticket in done.played)
            for ticket in done.played:
                self._standings.note(ticket.finished)
            if done.played:
                self._place()

    def end(self) -> bool:
        """End the rollout and return True where nothing is left. Otherwise return False, after a short wait where no
        ticket may start yet.
        """
        with self._changed:
            if self._left:
                self._changed.wait_for(lambda: self._own or self._batches, LOOK_S)
                return False
            self.stop()
            return True

    def stop(self) -> None:
        """End the rollout and drop the tickets that are left."""
        with self._changed:
            self.going, self._left, self._later = False, 0, []
            self._batches.clear()
            self._own.clear()
            self._changed.notify_all()
