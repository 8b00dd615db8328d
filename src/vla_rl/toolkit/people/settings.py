"""Settings of questions to a person. Cheap to import: plugins offer them, `questions.py` implements them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import field, frozen
from attrs import validators as v


@frozen(kw_only=True)
class Page:
    """A web page that this machine alone can open."""

    type: Literal["page"] = "page"
    port: int = field(default=0, validator=[v.ge(0), v.le(65_535)])
    """Port of the page; 0: a free one."""
    address_file: Path | None = None
    """New file for the page's address with its token, which the current user alone can read, until the page is closed;
    null: it is only logged."""


@frozen(kw_only=True)
class Terminal:
    """The terminal of the run."""

    type: Literal["terminal"] = "terminal"
    device: Path = Path("/dev/tty")
    """Device of the terminal."""


@frozen(kw_only=True)
class PanelSettings:
    """Where a person answers, and how long an answer may take."""

    ask: Page | Terminal = field(factory=Page)
    """Where the person answers."""
    deadline_s: float = field(default=240.0, validator=[v.gt(0), v.le(86_400)])
    """Seconds that the person has for an answer, above 0, at most 86,400; then the run saves and ends, and says so."""
