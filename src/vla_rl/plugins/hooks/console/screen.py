"""Output of the console hook: a panel of six lines that is redrawn, or one line per step where the terminal cannot
redraw."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from vla_rl.core.errors import did_you_mean
from vla_rl.core.events import Evaluation, Run
from vla_rl.plugins.hooks.console.draw import LivePanel, progress_line, step_line, summary, warmup_line
from vla_rl.plugins.hooks.console.status import Status, percent

if TYPE_CHECKING:
    from vla_rl.plugins.hooks.console.config import ConsoleConfig


class Screen:
    """Shows a run on `console`, by default standard output."""

    def __init__(self, config: ConsoleConfig, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        able = self._console.is_terminal and not self._console.is_dumb_terminal
        self._is_live = config.mode == "live" or (config.mode == "auto" and able)
        self._every = config.every_s
        self._metric_patterns = config.metrics
        self._live: Live | None = None
        self._status: Status | None = None

    def on_run_start(self, run: Run) -> None:
        self._status = Status(run, metric_patterns=self._metric_patterns)
        begin = f"from step {run.first_step} to {run.steps}" if run.first_step else f"{run.steps} steps"
        if run.devices:
            self._say(f"devices: {escape(run.devices)}")
        self._say(f"[bold]{escape(run.name)}[/]  {begin}, in {escape(str(run.folder))}")
        if self._is_live:
            self._live = Live(LivePanel(self._status), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
            atexit.register(self._stop)

    def on_progress(self, phase: str, done: int, total: int) -> None:
        status = self._status
        if status is None:
            return
        status.progress(phase, done, total)
        if not self._is_live and status.seconds_silent >= self._every:
            self._say(escape(progress_line(status)))

    def on_update_end(self, step: int, metrics: dict[str, float]) -> None:
        if self._status is None:
            return
        self._status.updated(step, metrics)
        for name in self._status.unknown():
            near = did_you_mean(name, metrics)
            self._say(escape(f"console: no metric is called {name!r}{near}; metrics.jsonl (hook jsonl) has all"))
        if "bc_warmup/loss" in metrics:
            self._say(warmup_line(metrics))
        elif not self._is_live:
            self._say(escape(step_line(self._status)))

    def on_eval_end(self, step: int, evaluation: Evaluation) -> None:
        if self._status is None:
            return
        self._status.evaluated(evaluation)
        success, style = evaluation.success, self._status.eval_style
        self._say(
            f"evaluation at step {step}: success [{style}]{escape(percent(success))}[/] "
            f"of {success.n} episodes, {evaluation.seconds:.0f} s{_interventions(evaluation)}"
        )

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        path = Path(folder)
        shown_path = path.relative_to(run.folder) if path.is_relative_to(run.folder) else path
        self._say(f"[dim]checkpoint {escape(str(shown_path))}[/]")

    def on_fault(self, step: int, message: str) -> None:
        self._say(f"[bold red]fault at step {step}:[/] {escape(message)}")

    def on_run_end(self, run: Run, results: dict[str, Any]) -> None:
        self._stop()
        self._console.print(summary(run, results))

    def _say(self, markup: str) -> None:
        if self._status is not None:
            self._status.line_printed()
        self._console.print(markup, soft_wrap=not self._is_live)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            atexit.unregister(self._stop)


def _interventions(evaluation: Evaluation) -> str:
    """Describe how much others acted instead of the policy; empty without takeovers."""
    interventions = evaluation.interventions
    if interventions is None:
        return ""
    return f"; interventions in {interventions.rate:.0%} of steps, {percent(interventions.unaided)} without any"
