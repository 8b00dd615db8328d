"""What a person is asked through: the interface of the terminal and of the page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from vla_rl.core.types import Array

Answer = Literal["success", "failure", "ready", "stop"]


class Panel(ABC):
    """Shows an image and a text to a person, and takes answers."""

    place: str
    """Where the person answers, for messages."""

    @abstractmethod
    def show_text(self, text: str, answers: Sequence[Answer]) -> None:
        """Show a text, and offer answers, of which the first counts; earlier ones but "stop" are forgotten."""

    def show_image(self, image: Array) -> None:  # noqa: B027 - a terminal shows none
        """Show a camera image, uint8 [H, W, 3]."""

    @abstractmethod
    def take_answer(self, wait_s: float) -> Answer | None:
        """Return the answer and forget it, or None if none comes within `wait_s` seconds. "stop" comes before all
        others, is always offered, and stays until `close`."""

    @abstractmethod
    def close(self) -> None:
        """Free what is open; may be called twice."""
