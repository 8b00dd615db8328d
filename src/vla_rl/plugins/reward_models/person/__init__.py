"""`person`: a person beside the robot tells success and failure, resets the scene, and can stop the robot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class PersonConfig:
    """Spec keys of the reward model `person`."""

    ask: Literal["page", "terminal"] = "page"
    """Where the person answers: a web page that this machine alone can open (page), or the terminal."""
    deadline_s: float = field(default=240.0, validator=[v.gt(0), v.le(86_400)])
    """Seconds that the person has for an answer, above 0, at most 86,400; then the run saves and ends, and says so."""
    reset: bool = True
    """Before each episode, wait until the person says that the scene is reset. False: the simulator resets it."""
    outcome: bool = True
    """Ask for the outcome of episodes that end without an answer, by the step limit or by the simulator. False: they
    count as failures."""
    camera: str | None = None
    """Camera whose picture the page shows; null: the first one."""
    port: int = field(default=0, validator=[v.ge(0), v.le(65_535)])
    """Port of the page; 0: a free one. Page only."""
    address_file: Path | None = field(default=None)
    """File for the page's address with its token, which the current user alone can read; null: it is only logged. Page
    only."""
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


def build(config: PersonConfig, context: Context) -> Any:
    from vla_rl.plugins.reward_models.person.impl import PersonRewards

    return PersonRewards(config, context)


plugin = Plugin(
    config=PersonConfig, build=build, summary="a person tells success, resets the scene and stops the robot"
)
