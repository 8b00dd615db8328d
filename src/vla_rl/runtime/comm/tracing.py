"""Records for the trace: the calls of a process on its own clock, and the offsets between the clocks of machines."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple


class Event(NamedTuple):
    """A call. Times are seconds of the recorder's monotonic clock."""

    role: str
    method: str
    lane: Any
    """Lane or lanes of the call, if it has any."""
    start: float
    end: float
    main: bool = False
    """True for a call that is part of its role's phase of an iteration."""


RECEIVER = "receiver"
"""Track for calls during a learner's training: samples that arrive. Waiting times and sums are of `ROLES` alone."""


BACKGROUND = "background"
"""Track for calls of roles that a part of the training step adds, and of the policy that acts in their envs."""


CONCURRENT_TRACKS = (RECEIVER, BACKGROUND)
"""Tracks that do not belong to a role."""


HELD_EVENTS = 200_000
"""Events that a worker keeps between two fetches. Beyond that the oldest are dropped, and counted."""


class CallRecorder:
    """Recorder of the calls of one process; any thread may add."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=HELD_EVENTS)
        self.count = 0
        self._changing = Lock()

    def add(self, event: Event) -> None:
        with self._changing:
            self.count += 1
            self.events.append(event)

    def drain_events(self) -> tuple[list[Event], int]:
        """Return the events since the last call, and the number of events that were dropped."""
        with self._changing:
            events, count = list(self.events), self.count
            self.events.clear()
            self.count = 0
        return events, count - len(events)


def read_machine_clock() -> tuple[str, float]:
    """Return an identity of this machine since its boot, and its monotonic clock. Its processes share the clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(), monotonic()
    except OSError:
        return os.uname().nodename, monotonic()


def clock_ahead(ask: Callable[[], tuple[str, float]]) -> float:
    """Return how many seconds the machine clock read by `ask` is ahead of ours, by the quickest of five; here 0."""
    here = read_machine_clock()[0]
    trips: list[tuple[float, float]] = []
    for _ in range(5):
        before = monotonic()
        machine, remote_time = ask()
        after = monotonic()
        if machine == here:
            return 0.0
        trips.append((after - before, float(remote_time - (before + after) / 2)))
    return min(trips)[1]
