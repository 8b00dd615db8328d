"""Ctrl-C and SIGTERM: the first ends what is played and saves, the second stops at once.

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

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


class RunStopped(UserError):
    """Ctrl-C or SIGTERM: what there was to save is saved, and the run can be resumed."""

    exit_code = 130


class StopRequested(Exception):
    """Unwinds a phase that has not changed the weights."""


class Interrupts:
    """While entered, the first signal is noted and `check` raises StopRequested; the second is a KeyboardInterrupt,
    unless the run is `closing`: workers that are being ended are never left alone."""

    def __init__(self) -> None:
        self.requested = self.closing = False
        self.worth_saving = False
        """Until there is something to save, a stop ends any waiting."""

    def check(self) -> None:
        if self.requested:
            raise StopRequested

    def check_waiting(self) -> None:
        """For whoever waits for a worker."""
        if not self.worth_saving:
            self.check()

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.closing:
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        first = ": saving first" if self.worth_saving else ""
        with suppress(OSError):  # not print, which may be what was interrupted
            os.write(1, f"\nstopping{first}; once more to stop at once\n".encode())
