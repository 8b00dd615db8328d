"""Output of the console hook: a panel of six lines that is redrawn, or one line per step where the terminal cannot
redraw."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.events import Evaluation, Run, late_actions_of
from vla_rl.plugins.hooks.console.config import ConsoleConfig
from vla_rl.plugins.hooks.console.draw import LivePanel, draw_summary, progress_line, step_line, warmup_line
from vla_rl.plugins.hooks.console.status import Status, format_rate


class Screen:
    """Shows a run on `console`, by default standard output."""

    def __init__(self, config: ConsoleConfig, console: Console | None = None) -> None:
        self._console = console or _Output(highlight=False)
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
            self._print_line(f"devices: {escape(run.devices)}")
        self._print_line(f"[bold]{escape(run.name)}[/]  {begin}, in {escape(str(run.folder))}")
        if self._is_live:
            self._live = Live(LivePanel(self._status), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def on_progress(self, phase: str, done: int, total: int) -> None:
        status = self._status
        if status is None:
            return
        status.note_progress(phase, done, total)
        if not self._is_live and status.seconds_silent >= self._every:
            self._print_line(escape(progress_line(status)))

    def on_update_end(self, step: int, metrics: dict[str, float]) -> None:
        if self._status is None:
            return
        self._status.note_update(step, metrics)
        for name in self._status.find_unknown():
            near = did_you_mean(name, metrics)
            self._print_line(escape(f"console: no metric is called {name!r}{near}; metrics.jsonl (hook jsonl) has all"))
        if "bc_warmup/loss" in metrics:
            self._print_line(warmup_line(metrics))
        elif not self._is_live:
            self._print_line(escape(step_line(self._status)))

    def on_eval_end(self, step: int, evaluation: Evaluation) -> None:
        if self._status is None:
            return
        self._status.note_evaluation(evaluation)
        success, style = evaluation.success, self._status.eval_style
        lacking = f"; {len(evaluation.missing)} more without a result" if evaluation.missing else ""
        self._print_line(
            f"evaluation at step {step}: success [{style}]{escape(format_rate(success))}[/] "
            f"of {success.n} episodes, {evaluation.seconds:.0f} s{_describe_operation(evaluation)}{lacking}"
        )

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        path = Path(folder)
        shown_path = path.relative_to(run.folder) if path.is_relative_to(run.folder) else path
        self._print_line(f"[dim]checkpoint {escape(str(shown_path))}[/]")

    def on_fault(self, step: int, message: str) -> None:
        self._print_line(f"[bold red]fault at step {step}:[/] {escape(message)}")

    def on_run_end(self, run: Run, results: dict[str, Any]) -> None:
        self.on_close()
        self._console.print(draw_summary(run, results))

    def on_close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_line(self, markup: str) -> None:
        if self._status is not None:
            self._status.line_printed()
        self._console.print(markup, soft_wrap=not self._is_live)


class _Output(Console):
    """Standard output. Raises UserError if its reader has gone, as in `vla-rl run ... | head`."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()
        raise UserError("the output was closed by the program that reads it")


def _describe_operation(evaluation: Evaluation) -> str:
    """Describe how much others acted instead of the policy, and how many actions came late; empty without takeovers and
    in time."""
    text = ""
    if (interventions := evaluation.interventions) is not None:
        text = f"; interventions in {interventions.rate:.0%} of steps, {format_rate(interventions.unaided)} without any"
    if late := late_actions_of(evaluation.episodes):
        text += f"; {late:.0%} of actions late"
    return text
