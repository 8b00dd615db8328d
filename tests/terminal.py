"""A terminal for programs of the tests. They write to a pseudo-terminal, and a test reads what a person sees."""

from __future__ import annotations

import os
import pty
import select
import termios
from collections.abc import Callable
from time import monotonic
from typing import Self

import pyte


class Terminal:
    """A terminal of this size. The program gets `stream` as its standard streams."""

    def __init__(self, columns: int = 110, lines: int = 40) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._decoder = pyte.ByteStream(self._screen)
        self._master, self.stream = pty.openpty()
        termios.tcsetwinsize(self.stream, (lines, columns))

    @property
    def text(self) -> str:
        """The screen, without spaces at the ends of its lines and without empty lines below."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    @property
    def cursor_hidden(self) -> bool:
        return bool(self._screen.cursor.hidden)

    def wait_for(self, seen: Callable[[str], bool], deadline_s: float = 100.0) -> str:
        """Read until the screen looks like this, and return its text."""
        end = monotonic() + deadline_s
        while not seen(self.read()):
            assert monotonic() < end, f"not seen:\n{self.text}"
            select.select([self._master], [], [], 0.05)
        return self.text

    def read(self) -> str:
        """Read what the program has written by now, and return the screen's text."""
        while select.select([self._master], [], [], 0.0)[0]:
            self._decoder.feed(os.read(self._master, 65536))
        return self.text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._master)
        os.close(self.stream)
