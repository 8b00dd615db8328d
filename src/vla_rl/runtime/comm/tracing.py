"""What a process records for the trace: its calls, on its own clock, and the clocks of other machines."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple


class Event(NamedTuple):
    """A call; seconds are of the recorder's monotonic clock."""

    role: str
    method: str
    lane: Any
    """Its lane, or lanes, if it has any."""
    start: float
    end: float
    main: bool = False
    """It makes up the role's phase of an iteration."""


RECEIVER = "receiver"
"""Beside a learner: what comes to it while it trains. Waiting and sums are of `ROLES` alone."""


PRACTICE = "practice"
"""Beside the others: what a world model, and the policy in it, do."""


OTHERS = {"beside": RECEIVER, "practice": PRACTICE}
"""By `Remote.track`."""


HELD_EVENTS = 200_000
"""Events that a worker holds between two fetches; beyond that the oldest are dropped, and counted."""


class CallRecorder:
    """The calls of one process."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=HELD_EVENTS)
        self.count = 0
        self._changing = Lock()

    def add(self, event: Event) -> None:
        with self._changing:
            self.count += 1
            self.events.append(event)

    def drain(self) -> tuple[list[Event], int]:
        """-> (events since the last time, number of those that were dropped)."""
        with self._changing:
            events, count = list(self.events), self.count
            self.events.clear()
            self.count = 0
        return events, count - len(events)


def clock() -> tuple[str, float]:
    """-> (this machine since its start, its monotonic clock): processes of one machine share the clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(), monotonic()
    except OSError:
        return os.uname().nodename, monotonic()


def clock_ahead(ask: Callable[[], tuple[str, float]]) -> float:
    """Seconds that another process' `clock`, which `ask` reads, is ahead of ours, by the quickest of some round trips;
    0 on the same machine."""
    here = clock()[0]
    trips: list[tuple[float, float]] = []
    for _ in range(5):
        before = monotonic()
        machine, there = ask()
        after = monotonic()
        if machine == here:
            return 0.0
        trips.append((after - before, float(there - (before + after) / 2)))
    return min(trips)[1]
