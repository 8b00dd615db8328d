"""Questions in the terminal: a person answers with a letter and Enter."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from vla_rl.core.errors import SafetyStop, UserError
from vla_rl.toolkit.people.panel import Answer, Panel

LETTERS: dict[str, Answer] = {"s": "success", "f": "failure", "r": "ready", "x": "stop"}
LONGEST_LINE = 1000
"""Bytes that are read of a line; a longer one does not count as an answer."""


class TerminalPanel(Panel):
    """A terminal that a person types into."""

    def __init__(self, device: Path, path: str) -> None:
        """Open the terminal. Raises UserError if it cannot be opened.

        Args:
            path: path of the settings in a spec, for messages.
        """
        self.place = f"the terminal {device}"
        try:
            self._file: int | None = os.open(device, os.O_RDWR | os.O_NOCTTY)
        except OSError as exc:
            raise UserError(
                f"{path}.ask: there is no terminal {device} ({exc.strerror}); with Ray workers have none: use "
                "runtime.backend: local, or ask: {type: page}"
            ) from exc
        self._answers: tuple[Answer, ...] = ()
        self._line = b""
        self._stopped = False

    def show_text(self, text: str, answers: Sequence[Answer]) -> None:
        while self.take_answer(0.0) not in (None, "stop"):
            pass  # typed before the question
        self._answers = tuple(answers)
        keys = {answer: letter for letter, answer in LETTERS.items()}
        offered = [f"{keys[answer]} = {answer}" for answer in (*self._answers, "stop")]
        assert self._file is not None
        os.write(self._file, f"{text} [{', '.join(offered)}, then Enter]\n".encode())

    def take_answer(self, wait_s: float) -> Answer | None:
        end = monotonic() + wait_s
        while not self._stopped:
            line, newline, rest = self._line.partition(b"\n")
            if newline:
                self._line = rest
                answer = LETTERS.get(line.decode(errors="replace").strip().lower())
                self._stopped = answer == "stop"
                if answer in self._answers:
                    self._answers = ()  # a question has one answer
                    return answer
            elif not self._read_input(max(end - monotonic(), 0.0)):
                return None
        return "stop"

    def _read_input(self, wait_s: float) -> bool:
        """Read what is typed within this many seconds. Return whether something was."""
        if self._file is None or not select.select([self._file], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self._file, LONGEST_LINE)
        except OSError:  # what Linux says of a terminal whose other end is closed
            data = b""
        if not data:
            raise SafetyStop(f"{self.place} is closed, and no one could stop the robot there, so the run ends")
        self._line = (self._line + data)[-LONGEST_LINE:]
        return True

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
