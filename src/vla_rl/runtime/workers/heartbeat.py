"""Heartbeats of a worker's threads: what each thread is doing, and when it last showed that it is alive."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import time

from vla_rl.runtime.comm.interfaces import IDLE

Activity = tuple[str, float]
"""What a thread is doing, and the time of its last heartbeat (seconds since the epoch)."""


class Heartbeats:
    """Heartbeats of all threads of one worker.

    There is one entry for each thread, because weights are published while a rollout runs. Each thread writes its own
    entry only, so no lock is needed.
    """

    def __init__(self, on_heartbeat: Callable[[], None] = lambda: None) -> None:
        """Create the heartbeats. `on_heartbeat` is called at each of them, in the thread that works."""
        self._on_heartbeat = on_heartbeat
        self._activities: dict[int, Activity] = {}
        """Thread id -> its activity."""

    def record_heartbeat(self, activity: str | None = None) -> None:
        """Record that this thread is alive. A call without a heartbeat for longer than the deadline is reported as
        hung.

        Args:
            activity: what the thread begins to do; None: it continues what it was doing.
        """
        thread = get_ident()
        if activity is None:
            activity, _ = self._activities.get(thread, (IDLE, 0.0))
        self._activities[thread] = activity, time()
        self._on_heartbeat()

    def record_idle(self) -> None:
        """Record that this thread has nothing to do, or waits for others."""
        self.record_heartbeat(IDLE)

    def longest_activity(self) -> Activity:
        """Return the activity that has gone on longest without a heartbeat; `IDLE` where all threads are idle."""
        busy = [activity for activity in tuple(self._activities.values()) if activity[0] != IDLE]
        return min(busy, key=lambda activity: activity[1], default=(IDLE, time()))
