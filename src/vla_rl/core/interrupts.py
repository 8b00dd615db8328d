"""Ctrl-C, SIGTERM and SIGHUP (a terminal that closes): the first ends what is played and saves, the second stops at
once.

A terminal sends Ctrl-C to a whole process group, and Slurm sends SIGTERM to every process of a job. Only the driver
takes them as an order; workers, simulators in processes of their own and a Ray that was started for the run go on until
the driver ends them.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

from vla_rl.core.errors import UserError

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class RunStopped(UserError):
    """Ctrl-C or SIGTERM: what there was to save is saved, and the run can be resumed."""

    exit_code = 130


class StopRequested(Exception):
    """Unwinds a phase that has not changed the weights."""


class StopAtOnce(KeyboardInterrupt):
    """The second signal."""


class Interrupts:
    """While entered, the first signal is noted and `check` raises StopRequested; the second is a KeyboardInterrupt,
    unless the run is `closing`: workers that are being ended are never left alone. A listener that fails stops a run
    in the same way (`stop_because`)."""

    def __init__(self) -> None:
        self.requested = False
        self.closing = False
        self.worth_saving = False
        """Until there is something to save, a stop ends any waiting."""
        self.reason: UserError | None = None
        """What stops the run, where no signal does."""
        self._signalled = False

    def begin(self) -> None:
        """Before an attempt at the run. Raises StopRequested where a signal came meanwhile."""
        self.closing = False
        self.worth_saving = False
        self.check()

    def stop_because(self, reason: UserError) -> None:
        """Stop as after a signal. The first reason counts."""
        self.reason = self.reason or reason
        self.requested = True

    def stopped(self, how: str) -> UserError:
        """What a run that was stopped ends with; `how`: what was saved."""
        if self.reason is None:
            return RunStopped(how)
        self.reason.add_note(f"  {how}")
        return self.reason

    def check(self) -> None:
        if self.requested:
            raise StopRequested

    def check_waiting(self) -> None:
        """For whoever waits for a worker."""
        if not self.worth_saving:
            self.check()

    def __enter__(self) -> Self:
        heard = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._note) for number in heard}  # SIG_IGN: nohup
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.closing:
            self.requested = True  # before another attempt
            return
        if self._signalled:
            raise StopAtOnce
        self._signalled = True
        self.requested = True
        first = ": saving first" if self.worth_saving else ""
        with suppress(OSError):  # not print, which may be what was interrupted
            os.write(1, f"\nstopping{first}; once more to stop at once\n".encode())
