"""Questions to a person, with a deadline, a safety stop and Ctrl-C."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from vla_rl.core.errors import NobodyAnswered, SafetyStop, UserError
from vla_rl.core.interrupts import StopRequested
from vla_rl.toolkit.people.page import PagePanel
from vla_rl.toolkit.people.panel import Answer, Panel
from vla_rl.toolkit.people.settings import Page, PanelSettings

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


ASKED_S = 0.1
"""Seconds between looks at whether the run has to stop, while a person is waited for."""
THANKS = "thank you"


def open_panel(settings: PanelSettings, path: str) -> Panel:
    """Open the page or the terminal. Raises UserError where it cannot be opened.

    Args:
        path: path of the settings in a spec, for messages.
    """
    ask = settings.ask
    if isinstance(ask, Page):
        return PagePanel(ask.port, ask.address_file, f"{path}.ask")
    return TerminalPanel(ask.device, path)


def ask_person(
    panel: Panel,
    question: str,
    answers: tuple[Answer, ...],
    *,
    deadline_s: float,
    stop_requested: Callable[[], bool],
    path: str,
) -> Answer:
    """Wait for an answer. Raises SafetyStop, NobodyAnswered when the deadline has passed, and StopRequested.

    Args:
        deadline_s: seconds for the answer.
        stop_requested: whether the run has to stop (Ctrl-C).
        path: path of the settings in a spec, for messages.
    """
    panel.show_text(question, answers)
    end = monotonic() + deadline_s
    answer = None
    while answer is None and (left := end - monotonic()) > 0:
        if stop_requested():
            raise StopRequested
        answer = panel.take_answer(min(left, ASKED_S))
    check_stop(panel, answer)
    if answer is None:
        raise NobodyAnswered(
            f"no one answered {question!r} at {panel.place} within {deadline_s:g} s ({path}.deadline_s), so the run "
            "ends"
        )
    panel.show_text(THANKS, ())
    return answer


def check_stop(panel: Panel, answer: Answer | None) -> None:
    """Raise SafetyStop for the answer "stop"."""
    if answer == "stop":
        raise SafetyStop(f"a person stopped the robot at {panel.place}, so the run ends")
