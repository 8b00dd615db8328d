"""Real time for simulators and robots: actions begin at a fixed rate, and those that come too late are counted."""

from __future__ import annotations

import time
from collections.abc import Callable

TOLERANCE = 0.1
"""Longest delay of an action that does not count as late, as a share of a period."""


class RealTime:
    """The clock of one env: `wait` before each action."""

    def __init__(
        self,
        control_hz: float | None,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Create a clock.

        Args:
            control_hz: actions a second; None: `wait` returns at once.
            now, sleep: clock and sleep in seconds, for tests.
        """
        self._period = None if control_hz is None else 1 / control_hz
        self._now = now
        self._sleep = sleep
        self._due: float | None = None

    def restart(self) -> None:
        """Begin an episode: its first action is due when it comes."""
        self._due = None

    def wait(self) -> bool:
        """Wait until the next action is due. Return whether it is late; the next is due a period later: no bursts."""
        if self._period is None:
            return False
        now = self._now()
        due = now if self._due is None else self._due
        late = now - due > TOLERANCE * self._period
        if now < due:
            self._sleep(due - now)
        self._due = (now if late else due) + self._period
        return late
