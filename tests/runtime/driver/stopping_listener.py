"""A plugin in one file: a listener that ends the run in an event, from a step on."""

from __future__ import annotations

from attrs import frozen

from vla_rl.core.declarations import HookPlugin
from vla_rl.core.events import Run


@frozen(kw_only=True)
class StopConfig:
    event: str = "on_eval_end"
    at: int = 2


class Stop:
    def __init__(self, config: StopConfig) -> None:
        self.config = config

    def on_run_start(self, run: Run) -> None:
        self._act(run, "on_run_start", self.config.at)

    def on_rollout_end(self, run: Run, step: int) -> None:
        self._act(run, "on_rollout_end", step)

    def on_update_end(self, run: Run, step: int) -> None:
        self._act(run, "on_update_end", step)

    def on_eval_end(self, run: Run, step: int) -> None:
        self._act(run, "on_eval_end", step)

    def _act(self, run: Run, event: str, step: int) -> None:
        if event == self.config.event and step >= self.config.at:
            run.stop(f"good enough at step {step}")


vla_rl_plugins = {"hook": {"stop": HookPlugin(config=StopConfig, build=Stop, summary="ends the run")}}
