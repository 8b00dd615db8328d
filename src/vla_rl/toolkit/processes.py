"""Processes that another one starts and ends, and their signals."""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


def leave_if_importing() -> None:
    """End this process at once where it is a row's, which only imports the main module of its parent: a script without
    a `__main__` guard would start its run in each of them. `unguarded_call` lets the parent say so."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(1)


def unguarded_call() -> str:
    """Where the main module does what goes on now, as file:line, unless that is below `if __name__ == "__main__":`;
    empty otherwise."""
    main, ident = sys.modules["__main__"], threading.main_thread().ident
    file = getattr(main, "__file__", None)
    frame = sys._current_frames().get(ident or 0)  # noqa: SLF001 - rows start in threads, too
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back
    if frame is None or file is None:
        return ""
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return ""
    here = [node for node in body if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno)]
    if any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in here):
        return ""
    return f"{file}:{frame.f_lineno}"


@contextmanager
def held(numbers: frozenset[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Signals wait for the end of this block. Processes and threads that begin in it are not reached by them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
