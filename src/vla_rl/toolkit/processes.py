"""Signals and lifetime of child processes."""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from vla_rl.core.interrupts import SIGNALS


def ignore_signals() -> None:
    """Ignore stop signals in a process that another one ends; must be called in its main thread."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def leave_with_parent() -> None:
    """End this process when its parent has ended in any way, whatever this one is doing."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch_parent, daemon=True).start()


class _Late(BaseException):
    """Raised by the alarm. It is not an Exception, so code that swallows any Exception does not swallow it."""


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in this block after this many seconds, and again every second if it is swallowed. Does nothing
    outside the main thread, and cannot interrupt a call that never returns to Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_late(number: int, frame: FrameType | None) -> None:
        raise _Late

    begun = time.monotonic()
    handler = signal.signal(signal.SIGALRM, raise_late)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    except _Late:
        raise TimeoutError from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # an alarm that was set elsewhere
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - begun)), interval)


def leave_if_importing() -> None:
    """End this process at once if it is an env process that only imports its parent's main module. Without a `__main__`
    guard the script would start its run in each of them. `unguarded_call` lets the parent report that."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(1)


def unguarded_call() -> str:
    """Return the running line of the main module, file:line, if not below `if __name__ == "__main__":`; else ""."""
    main, ident = sys.modules["__main__"], threading.main_thread().ident
    file = getattr(main, "__file__", None)
    frame = sys._current_frames().get(ident or 0)  # noqa: SLF001 - envs start in threads, too
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back
    if frame is None or file is None:
        return ""
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return ""
    enclosing = [node for node in body if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno)]
    if any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in enclosing):
        return ""
    return f"{file}:{frame.f_lineno}"


@contextmanager
def delay_signals(numbers: frozenset[signal.Signals] = SIGNALS) -> Iterator[None]:
    """Delay signals until the end of this block. Processes and threads started in it do not receive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def find_descendants(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process; none if it has ended."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def kill_process(process: psutil.Process) -> None:
    """Kill a process, unless it has ended."""
    with suppress(psutil.Error):
        process.kill()


def module_path() -> str:
    """Return the PYTHONPATH for another interpreter: it finds the user's modules and its own packages, never ours."""
    prefixes = (sys.prefix, sys.base_prefix)
    own = [path for path in map(str, (Path.cwd(), *sys.path)) if path and not path.startswith(prefixes)]
    return os.pathsep.join(dict.fromkeys(own))
