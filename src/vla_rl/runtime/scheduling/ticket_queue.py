"""What a policy's worker has to play, and what came of it."""

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
"""Seconds between two looks at whether to leave, where nothing may be played yet."""


class _Batch:
    """Tickets that were given together, by task."""

    def __init__(self, starts: Iterable[EpisodeRequest]):
        self.of_task: dict[str, deque[EpisodeRequest]] = {}
        for start in starts:
            self.of_task.setdefault(start.state.task, deque()).append(start)

    def pop(self, tasks: Collection[str]) -> EpisodeRequest:
        """The next one of these tasks; if there is none, of the task that has most left."""
        task = next((task for task in tasks if task in self.of_task), None)
        if task is None:
            task = max(self.of_task, key=lambda name: len(self.of_task[name]))
        start = self.of_task[task].popleft()
        if not self.of_task[task]:
            del self.of_task[task]
        return start


class TicketQueue:
    """Tickets of one worker. One thread plays, others give tickets and ask for what came of them."""

    def __init__(self, lanes: Sequence[LaneSlice], batches: Iterable[Sequence[EpisodeRequest]] = ()) -> None:
        """`batches`: to begin with."""
        self.lanes = len(lanes)
        self.going = False
        self._changed = Condition()
        self._batches: deque[_Batch] = deque()
        self._left = 0
        self._held: dict[int, deque[str]] = {}
        """Lane -> tasks that its rows got last: many simulators need seconds to build the scene of another."""
        self._lane_of = {row: lane.index for lane in lanes for row in range(lane.first_row, lane.first_row + lane.rows)}
        self._own: dict[int, list[EpisodeRequest]] = {}
        """Lane -> tickets of its rows' streams."""
        self._later: list[list[EpisodeRequest]] = []
        """Those that wait for the end of others, with which they go on, or for a version of the weights."""
        self._version = 0
        self._standings = StreamCursors()
        self._report = RolloutReport()
        self._done: set[int] = set()
        """Tickets in the report."""
        if batches:
            self.begin(batches)

    # ------------------------------------------------------------------------------------- by whoever gives tickets

    def begin(self, batches: Iterable[Sequence[EpisodeRequest]]) -> None:
        """Before the first are played."""
        with self._changed:
            self.going = True
            self._add(batches)

    def give(self, batches: Iterable[Sequence[EpisodeRequest]]) -> bool:
        """-> whether these will be played; if not, playing has ended, and has to begin anew."""
        with self._changed:
            if self.going:
                self._add(batches)
            return self.going

    def report(self, needed: Collection[int], early: bool) -> RolloutReport:
        """Wait until all these tickets are played (`early`: one of all), or playing has ended. -> what was not
        reported before."""
        with self._changed:
            self._changed.wait_for(lambda: not self.going or (self._done if early else self._done.issuperset(needed)))
            found, self._report = self._report, RolloutReport()
            self._done.clear()
            return found

    def reach(self, version: int) -> None:
        """The policy has these weights now."""
        with self._changed:
            self._version = version
            self._place()

    def _add(self, batches: Iterable[Sequence[EpisodeRequest]]) -> None:
        for starts in batches:
            self._left += len(starts)
            self._later.append(list(starts))
        self._place()

    def _place(self) -> None:
        """Let those of the waiting tickets be played that may."""
        later, self._later = self._later, []
        for starts in later:
            anywhere, waiting = [], []
            for start in map(self._standings.placed, starts):
                if start.least > self._version or (start.row is not None and start.actions is None):
                    waiting.append(start)
                elif start.row is None:
                    anywhere.append(start)
                else:
                    self._own.setdefault(self._lane_of[start.row], []).append(start)
            if anywhere:
                self._batches.append(_Batch(anywhere))
            if waiting:
                self._later.append(waiting)
        self._changed.notify_all()

    # -------------------------------------------------------------------------------------------- by whoever plays

    def tickets(self, lane: Lane, free: int, ending: int, waiting: int) -> list[EpisodeRequest]:
        """For the rows of a lane that are free, or will be after their next chunk, and some to wait there for those
        that end before they have to: fewer and fewer, so that no lane holds what another could play. Tickets of
        streams go to the lanes that have their rows."""
        with self._changed:
            spare = self._left if self.lanes == 1 else (self._left - free) // (2 * self.lanes)
            want = free + max(ending, min(lane.slice.rows - free, spare)) - waiting
            held = self._held.setdefault(lane.slice.index, deque(maxlen=lane.slice.rows))
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
        """Tickets that ended, and what was done."""
        with self._changed:
            self._report.played += done.played
            self._report.add(done)
            self._done.update(ticket.finished.number for ticket in done.played)
            for ticket in done.played:
                self._standings.note(ticket.finished)
            if done.played:
                self._place()

    def end(self) -> bool:
        """Nothing is left; -> False where there is something to play, or may soon be."""
        with self._changed:
            if self._left:
                self._changed.wait_for(lambda: self._own or self._batches, LOOK_S)
                return False
            self.stop()
            return True

    def stop(self) -> None:
        """Playing ends, with whatever is left."""
        with self._changed:
            self.going, self._left, self._later = False, 0, []
            self._batches.clear()
            self._own.clear()
            self._changed.notify_all()
