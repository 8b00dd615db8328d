"""Settings of questions to a person. Cheap to import: plugins offer them, `questions.py` implements them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v


@frozen(kw_only=True)
class PanelSettings:
    """Where a person answers, and how long an answer may take."""

    ask: Literal["page", "terminal"] = "page"
    """Where the person answers: a web page that this machine alone can open (page), or the terminal."""
    deadline_s: float = field(default=240.0, validator=[v.gt(0), v.le(86_400)])
    """Seconds that the person has for an answer, above 0, at most 86,400; then the run saves and ends, and says so."""
    port: int = field(default=0, validator=[v.ge(0), v.le(65_535)])
    """Port of the page; 0: a free one. Page only."""
    address_file: Path | None = field(default=None)
    """New file for the page's address with its token, which the current user alone can read, until the page is closed;
    null: it is only logged. Page only."""
    terminal: Path = field(default=Path("/dev/tty"))
    """Device of the terminal. Terminal only."""

    @port.validator
    @address_file.validator
    def _page_only(self, attribute: Any, value: Any) -> None:
        if self.ask != "page" and value != attribute.default:
            raise ValueError(f"has no effect with ask: {self.ask}; use ask: page")

    @terminal.validator
    def _terminal_only(self, attribute: Any, value: Any) -> None:
        if self.ask != "terminal" and value != attribute.default:
            raise ValueError("has no effect with ask: page; use ask: terminal")
