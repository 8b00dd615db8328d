"""Processes that another one starts and ends, and their signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vla_rl.core.interrupts import SIGNALS


def ignore_signals() -> None:
    """For a process that another one ends; to be called in its main thread."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def leave_with_parent() -> None:
    """End this process when the one that started it has ended in any way, whatever this one is doing."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Late(BaseException):
    """Raised by the alarm: code that passes over any Exception does not pass over it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in this block after so many seconds, and again every second where that is passed over. Does
    nothing outside of the main thread. A call that never comes back to Python is not left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise _Late

    begun = time.monotonic()
    handler = signal.signal(signal.SIGALRM, late)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    except _Late:
        raise TimeoutError from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # somebody else's alarm
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - begun)), interval)


@contextmanager
def held(numbers: frozenset[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Signals wait for the end of this block. Processes and threads that begin in it are not reached by them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
