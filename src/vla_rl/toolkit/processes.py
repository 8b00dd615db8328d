"""Processes that another one starts and ends, and their signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def held(numbers: frozenset[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Signals wait for the end of this block. Processes and threads that begin in it are not reached by them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
