"""A plugin in one file: a listener that does something wrong in an event, from a step on."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from vla_rl.core.declarations import HookPlugin
from vla_rl.core.errors import WorkerDied


@frozen(kw_only=True)
class BadConfig:
    does: Literal["raise", "exit", "interrupt", "bare", "write", "fill", "die"] = "raise"
    event: str = "on_update_end"
    at: int = 2
    file: str = ""
    """File that "fill" makes as long as the disk lets it."""


class Bad:
    def __init__(self, config: BadConfig) -> None:
        self.config = config

    def on_run_start(self) -> None:
        self._act("on_run_start", self.config.at)

    def frames_wanted(self, step: int) -> int:
        self._act("frames_wanted", step)
        return 0

    def on_progress(self) -> None:
        self._act("on_progress", self.config.at)

    def on_rollout_end(self, step: int, metrics: dict[str, float]) -> None:
        self._act("on_rollout_end", step, metrics)

    def on_update_end(self, step: int, metrics: dict[str, float]) -> None:
        self._act("on_update_end", step, metrics)

    def on_weights_published(self, step: int) -> None:
        self._act("on_weights_published", step)

    def on_eval_end(self, step: int) -> None:
        self._act("on_eval_end", step)

    def on_checkpoint(self, step: int) -> None:
        self._act("on_checkpoint", step)

    def on_run_end(self, results: dict[str, Any]) -> None:
        self._act("on_run_end", self.config.at, results)

    def _act(self, event: str, step: int, metrics: dict[str, Any] | None = None) -> None:
        if event != self.config.event or step < self.config.at:
            return
        match self.config.does:
            case "raise":
                raise ValueError("the plot has no axes")
            case "exit":
                sys.exit(5)
            case "interrupt":
                raise KeyboardInterrupt
            case "bare":
                raise BaseException("bare")  # noqa: TRY002
            case "die":
                raise WorkerDied("worker 1 (policy) died")
            case "write" if metrics is not None:
                metrics["loss/total"] = "spoilt"
            case "fill":
                with suppress(OSError), Path(self.config.file).open("wb", buffering=0) as file:
                    while True:
                        file.write(b"x" * 512)


vla_rl_plugins = {"hook": {"bad": HookPlugin(config=BadConfig, build=Bad, summary="does something wrong")}}
