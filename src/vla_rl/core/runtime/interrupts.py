"""Ctrl-C and SIGTERM: the first ends the phase and saves, the second stops at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

from vla_rl.core.errors import UserError


class RunStopped(UserError):
    """Ctrl-C or SIGTERM: the run was saved and can be resumed."""

    exit_code = 130


class StopRequested(Exception):
    """Unwinds a phase that has not changed the weights."""


class Interrupts:
    """While entered, the first signal is noted and `check` raises StopRequested; the second is a KeyboardInterrupt,
    unless the run is `closing`: workers that are being ended are never left alone."""

    def __init__(self) -> None:
        self.requested = self.closing = False

    def check(self) -> None:
        if self.requested:
            raise StopRequested

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
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
        print("\nstopping: saving after this phase; once more to stop at once", flush=True)
