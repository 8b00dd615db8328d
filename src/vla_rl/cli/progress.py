"""How far a command is that says nothing else until its end: a line on stderr every so often."""

from __future__ import annotations

import sys
from time import perf_counter

EVERY_S = 30.0


class Progress:
    def __init__(self, what: str):
        """`what`: is counted, such as "episodes"."""
        self.what, self.begun = what, perf_counter()
        self.last = self.begun

    def __call__(self, done: int, total: int) -> None:
        now = perf_counter()
        if total and now - self.last >= EVERY_S:
            self.last = now
            minutes, seconds = divmod(int(now - self.begun), 60)
            print(f"{done:,} of {total:,} {self.what}, {minutes}:{seconds:02}", file=sys.stderr, flush=True)
