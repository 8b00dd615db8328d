"""A plugin in one file: a listener that writes to a file how its run ended. On request it waits in an event."""

from __future__ import annotations

import threading
from pathlib import Path

from attrs import frozen

from vla_rl.core.declarations import HookPlugin


@frozen(kw_only=True)
class ClosingConfig:
    file: str
    waits: str = ""
    """Event in which it waits for a minute."""


class Closing:
    def __init__(self, config: ClosingConfig) -> None:
        self.config = config

    def on_checkpoint(self) -> None:
        self._wait("on_checkpoint")

    def on_close(self, error: BaseException | None) -> None:
        with Path(self.config.file).open("a") as file:
            file.write("None\n" if error is None else f"{type(error).__name__}\n")
        self._wait("on_close")

    def _wait(self, event: str) -> None:
        if self.config.waits == event:
            print(f"waiting in {event}")
            threading.Event().wait(60.0)


vla_rl_plugins = {"hook": {"closing": HookPlugin(config=ClosingConfig, build=Closing, summary="notes ends")}}
