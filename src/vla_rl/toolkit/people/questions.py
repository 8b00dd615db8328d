"""Questions to a person, with a deadline, a safety stop and Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from vla_rl.core.errors import NobodyAnswered, SafetyStop
from vla_rl.core.interrupts import StopRequested
from vla_rl.toolkit.people.page import PagePanel
from vla_rl.toolkit.people.panel import Answer, Panel
from vla_rl.toolkit.people.settings import Page, PanelSettings
from vla_rl.toolkit.people.terminal import TerminalPanel

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
