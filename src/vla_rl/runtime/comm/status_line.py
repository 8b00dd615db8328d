"""Progress line on stderr for waits that nothing else shows. A terminal gets one line that is overwritten; elsewhere (a
log file) there is a line at most every `EVERY_S` seconds."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from vla_rl.toolkit.waiting import PATIENCE_S, list_running_work, listen_to_work, merge_works

EVERY_S = 30.0
REDRAW_S = 0.2
UNITS = {
    "starting envs": "envs",
    "loading the model": "MB",
    "starting workers": "workers",
    "eval": "episodes",
    "planning": "strategies",
}
"""Unit in which the work of each title is counted."""


class StatusLine:
    """Progress line for one wait, or for several one after another."""

    def __init__(self) -> None:
        self._title = ""
        self._begun = monotonic()
        self._last = self._begun
        self._since = self._begun
        self._shown = False

    def show_progress(self, title: str, done: int, total: int) -> None:
        """Show the progress of "starting envs", or "starting envs: TASK". Prints nothing in the first `PATIENCE_S`."""
        now, live = monotonic(), sys.stderr.isatty()
        title, _, about = title.partition(": ")
        if title != self._title:
            self._begun = now
            self._title = title
        if now - self._since < PATIENCE_S or now - self._last < (REDRAW_S if live else EVERY_S):
            return
        self._last = now
        minutes, seconds = divmod(int(now - self._begun), 60)
        count = f"{done:,} of {total:,} {UNITS.get(title, '')}".rstrip() + ", " if total else ""
        text = f"{title}: {count}{minutes}:{seconds:02}{f' ({about})' if about else ''}"
        if live:
            text = f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}"
            self._shown = True
        print(text, end="" if live else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line: the wait is over, or something else is about to be printed."""
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        self._shown = False
        self._title = ""
        self._since = monotonic()


@contextmanager
def showing_progress() -> Iterator[None]:
    """Show the long-running work of this process while the block runs."""
    line = StatusLine()

    def update_line() -> None:
        if work := merge_works(list_running_work()):
            line.show_progress(work.title, work.done, work.total)

    try:
        with listen_to_work(update_line):
            yield
    finally:
        line.clear()
