"""Ctrl-C, SIGTERM, SIGHUP (a terminal that closes) and SIGUSR1 (`sbatch --signal=USR1@60`): the first signal ends the
current phase and saves, the second stops at once.

A terminal sends Ctrl-C to a whole process group, and Slurm sends SIGTERM to every process of a job. Only the driver
obeys them. Workers, simulators' processes and the run's own Ray continue until the driver ends them.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from threading import Thread
from types import FrameType, TracebackType
from typing import Self

from vla_rl.core.errors import UserError

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
ANNOUNCE_S = 1.0
"""Seconds to wait for the line that a signal prints; nobody may be reading."""


def heard_signals() -> list[signal.Signals]:
    """Return the signals that stop a run, or a server: SIGHUP not under `nohup`, SIGUSR1 not where it is ignored."""
    kept = (signal.SIGINT, signal.SIGTERM)
    return [number for number in SIGNALS if number in kept or signal.getsignal(number) != signal.SIG_IGN]


class RunStopped(UserError):
    """Ctrl-C or SIGTERM stopped the run. Everything worth saving is saved, and the run can be resumed."""

    exit_code = 130


class StopRequested(Exception):
    """Unwinds a phase that has not changed the weights."""


class StopAtOnce(KeyboardInterrupt):
    """The second signal arrived: stop without saving."""


class Interrupts:
    """Signal handler of a run, used as a context manager. The first signal is noted, and `check_stop` raises
    StopRequested.
    The second raises KeyboardInterrupt, unless the run is `closing`: workers that are being ended are never abandoned.
    A failing listener stops a run in the same way (`stop_because`)."""

    def __init__(self) -> None:
        self.requested = False
        self.closing = False
        self.worth_saving = False
        """The run has something to save. Until then a stop also ends waiting for workers."""
        self.reason: UserError | None = None
        """Reason for the stop, if it was not a signal."""
        self._signalled = False
        self._announcing: Thread | None = None

    def begin_attempt(self) -> None:
        """Reset the state before an attempt at the run. Raise StopRequested if a signal came meanwhile."""
        self.closing = False
        self.worth_saving = False
        self.check_stop()

    def stop_because(self, reason: UserError) -> None:
        """Stop the run as a signal would. The first reason counts."""
        self.reason = self.reason or reason
        self.requested = True

    def stop_error(self, outcome: str) -> UserError:
        """Return the error that ends a stopped run. `outcome` says how the run ended and how to resume it."""
        if self.reason is None:
            return RunStopped(outcome)
        self.reason.add_note(f"  {outcome}")
        return self.reason

    def check_stop(self) -> None:
        if self.requested:
            raise StopRequested

    def check_waiting(self) -> None:
        """Raise StopRequested while waiting for a worker, as long as there is nothing to save."""
        if not self.worth_saving:
            self.check_stop()

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle_signal) for number in heard_signals()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._announcing is not None:
            self._announcing.join(ANNOUNCE_S)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.closing:
            self.requested = True  # `begin_attempt` of the next attempt raises StopRequested
            return
        if self._signalled:
            raise StopAtOnce
        self._signalled = True
        self.requested = True
        first = ": saving first" if self.worth_saving else ""
        text = f"\nstopping{first}; once more to stop at once"
        self._announcing = Thread(target=_print_line, args=(text,), name="interrupt", daemon=True)
        self._announcing.start()  # the signal may have interrupted a print of this thread


def _print_line(text: str) -> None:
    with suppress(OSError, ValueError):  # closed
        print(text, flush=True)
