"""Output of the console hook: a panel of six lines that is redrawn, or one line per step where the terminal cannot
redraw, and a summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.events import Evaluation, Rate, Run, late_actions_of
from vla_rl.plugins.hooks.console.config import ConsoleConfig
from vla_rl.plugins.hooks.console.status import Status, format_duration, format_rate, rate_style


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
    """Describe how much others acted instead of the policy and how many actions came late; empty for neither."""
    text = ""
    if (interventions := evaluation.interventions) is not None:
        text = f"; interventions in {interventions.rate:.0%} of steps, {format_rate(interventions.unaided)} without any"
    if late := late_actions_of(evaluation.episodes):
        text += f"; {late:.0%} of actions late"
    return text


COLOURS = {"env": "cyan", "policy": "magenta", "learner": "yellow", "messages": "bright_black"}
NUMBERS = {
    "loss/policy": "loss",
    "loss/imitation": "loss",
    "loss/value": "value loss",
    "policy/approx_kl": "kl",
    "loss/clip_fraction": "clipped",
    "policy/entropy": "entropy",
}
UNITS = {"rollout": "chunk steps", "eval": "episodes", "bc_warmup": "epochs", "demonstrations": "episodes"}
UNITS |= {"starting envs": "envs", "loading the model": "MB"}
"""Phase -> unit of its progress."""
SPARKS = "▁▂▃▄▅▆▇█"
BAR, SPLIT, SPARKED = 30, 12, 16
BARRED = 24
"""Longest task name, in characters, that leaves the summary room for bars next to its figures."""
MAX_WIDTH = 92


class LivePanel:
    """Renders a status each time that rich asks, so that the clock advances between events."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __rich__(self) -> RenderableType:
        status = self._status
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True, min_width=8)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        for row in _list_rows(status):
            rows.add_row(*row)
        return Panel(
            rows,
            box=box.ROUNDED,
            border_style="dim",
            title=f"[bold]{escape(status.run.name)}[/]",
            title_align="left",
            subtitle=f"{format_duration(status.elapsed_s)} elapsed, {format_duration(status.remaining_s)} to go",
            subtitle_align="right",
            width=MAX_WIDTH,
        )


def step_line(status: Status) -> str:
    """Return everything about one step on one line, for logs."""
    metrics, success = status.metrics, status.success_rate
    parts = [f"step {status.step}/{status.run.steps}"]
    if success is not None:
        parts.append(f"success {format_rate(success)} n={success.n}")
    if "env/return" in metrics:
        parts.append(f"reward {metrics['env/return']:.3g}")
    parts += [f"{label} {metrics[name]:.3g}" for name, label in NUMBERS.items() if name in metrics]
    parts += [f"{name} {value}" for name, value in status.chosen_metrics.items()]
    if "throughput/env_steps_per_s" in metrics:
        parts.append(f"{metrics['throughput/env_steps_per_s']:,.0f} env steps/s")
    if "imagination/paused" in metrics:
        count = metrics.get("imagination/episodes")
        parts.append("imagination paused" if count is None else f"{count:,.0f} episodes imagined")
    if "throughput/samples_per_s" in metrics:
        parts.append(f"{metrics['throughput/samples_per_s']:,.0f} samples/s")
    parts += [f"{label} {value}" for label, value in _describe_lag(metrics).items()]
    parts += [" ".join(f"{role} {share:.0%}" for role, share in status.time_split.items())] if status.time_split else []
    return ", ".join(
        [*parts, f"{format_duration(status.elapsed_s)} elapsed", f"{format_duration(status.remaining_s)} to go"]
    )


def progress_line(status: Status) -> str:
    """Return the progress of a long phase: `step 3 rollout: 48 of 128 chunk steps, 1:30`."""
    step = status.step if status.phase in ("eval", "demonstrations", "bc_warmup") else status.step + 1
    unit = UNITS.get(status.phase, "")
    done = f"{status.done:,} of {status.total:,} {unit}".rstrip() + ", " if status.total else ""
    about = f" ({status.about})" if status.about else ""
    return f"step {step} {status.phase}{about}: {done}{format_duration(status.in_phase)}"


def warmup_line(metrics: Mapping[str, float]) -> str:
    """Return the result of behaviour cloning before RL on one line."""
    texts = {"bc_warmup/expert_success": ", of an expert with success {:.0%}", "time/bc_warmup": ", {:.0f} s"}
    tail = "".join(text.format(metrics[name]) for name, text in texts.items() if name in metrics)
    return f"warm-up: loss {metrics['bc_warmup/loss']:.3g} on {metrics.get('bc_warmup/samples', 0):,.0f} samples{tail}"


def draw_summary(run: Run, results: dict[str, Any]) -> RenderableType:
    """Return success before and after training, per task when there are several."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    tasks = results.get("tasks", {})
    rates = {"all": results.get("success"), **(tasks if len(tasks) > 1 else {})}
    earlier = {"all": results.get("success_before"), **results.get("tasks_before", {})}
    barred = max(map(len, rates)) <= BARRED
    table.add_column("success", overflow="fold")
    for title, column_style in (("before", "dim"), ("after", ""), ("95 % interval", ""), ("n", "dim")):
        table.add_column(title, justify="right", style=column_style, no_wrap=True)
    if barred:
        table.add_column("")
    for name, rate in rates.items():
        if rate is None:
            continue
        before = earlier.get(name)
        past = f"{100 * before['rate']:.1f} %" if before else ""
        style = rate_style(rate["rate"], before and before["rate"]) if name == "all" else ""
        bar = ProgressBar(total=1.0, completed=rate["rate"], width=16, complete_style="green", finished_style="green")
        table.add_row(
            escape(name),
            past,
            Text(f"{100 * rate['rate']:.1f} %", style=style),
            f"{100 * rate['low']:.1f} to {100 * rate['high']:.1f}",
            str(rate["n"]),
            *([bar] if barred else ()),
        )
    seconds = results.get("wall_seconds")
    took = f" in {format_duration(seconds)}" if seconds is not None else ""
    done = f"[bold]{escape(run.name)}[/] finished{took}"
    if run.stop_reason is not None:
        done += f" after step {results['steps']} of {run.steps}: {escape(run.stop_reason)}"
    where = f"[dim]results, checkpoints and curves: {escape(str(run.folder))}[/]"
    roles = results.get("roles")
    work: list[RenderableType] = ["", _draw_roles(roles)] if roles else []
    return Group("", done, *([table] if table.row_count else []), *work, where)


def _draw_roles(roles: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of each role's busy and waiting time, as shares of the time of all training iterations. Each role
    is a column, so that it fits into a narrow terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("role", no_wrap=True)
    for name in roles:
        table.add_column(Text(name, style=COLOURS[{"sim": "env"}.get(name, name)]), justify="right", no_wrap=True)
    table.add_row("workers", *(str(usage["workers"]) for usage in roles.values()), style="dim")
    table.add_row("busy", *(_format_share(usage["busy"]) for usage in roles.values()), style="bold")
    for cause in next(iter(roles.values()))["waits_for"]:
        table.add_row(f"waits: {cause}", *(_format_share(usage["waits_for"][cause]) for usage in roles.values()))
    table.add_row("bubbles", *(_format_share(usage["bubbles"]) for usage in roles.values()))
    return table


def _format_share(share: float) -> str:
    return f"{100 * share:.1f} %" if share else "-"


def _list_rows(status: Status) -> Iterator[tuple[str, RenderableType]]:
    metrics = status.metrics
    yield "step", _draw_bar(status.step, status.run.steps, "green")
    yield status.phase, _draw_bar(status.done, status.total, "blue")
    yield "success", _format_success(status)
    if metrics:
        labels = {"env/return": "reward"} | NUMBERS
        yield "learning", _format_labelled({labels[name]: f"{metrics[name]:.3g}" for name in labels if name in metrics})
    if chosen := status.chosen_metrics:
        yield "chosen", _format_labelled(chosen)
    if ahead := _describe_lag(metrics):
        yield "ahead", _format_labelled(ahead)
    if status.time_split:
        yield "time", _draw_split(status)


def _describe_lag(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the policy lag of asynchronous rollouts and the learner's waiting time; empty for synchronous runs."""
    if "rollout/running_tickets" not in metrics:
        return {}
    cells = {"policy lag": f"{metrics.get('policy/lag_mean', 0.0):.2g} (most {metrics.get('policy/lag_max', 0.0):.0f})"}
    cells |= {kind: f"{metrics[f'rollout/{kind}_tickets']:,.0f}" for kind in ("ready", "running")}
    if metrics.get("time/step"):
        cells["learner waited"] = f"{metrics.get('time/rollout', 0.0) / metrics['time/step']:.0%}"
    return cells


def _draw_bar(done: int, total: int, colour: str) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    share = f"{100 * done / total:3.0f} %" if total else ""
    bar = ProgressBar(total=max(total, 1), completed=done, width=BAR, complete_style=colour, finished_style=colour)
    row.add_row(bar, f"{done:,} of {total:,}" if total else "", f"[dim]{share}[/]")
    return row


def _format_labelled(values: Mapping[str, str]) -> Text:
    text = Text()
    for label, value in values.items():
        text.append(f"{label} ", style="dim").append(f"{value}  ")
    return text


def _format_success(status: Status) -> Text:
    text = Text()
    if status.success_rate is not None:
        _append_rate(text, "rollout ", status.success_rate, "bold")
        recent = [min(len(SPARKS) - 1, int(rate * len(SPARKS))) for rate in status.history[-SPARKED:]]
        text.append(f"  {''.join(SPARKS[level] for level in recent)}  ", style="green")
    if status.last_eval is not None:
        _append_rate(text, f"eval at {status.last_eval.step} ", status.last_eval.success, status.eval_style)
    return text or Text("nothing measured yet", style="dim")


def _append_rate(text: Text, label: str, rate: Rate, style: str) -> None:
    text.append(label, style="dim")
    text.append(f"{100 * rate.rate:.1f} %", style=style)
    text.append(f" {100 * rate.low:.0f}-{100 * rate.high:.0f}", style="dim")


def _draw_split(status: Status) -> Text:
    text = Text()
    for role, share in status.time_split.items():
        text.append("█" * round(SPLIT * share), style=COLOURS[role])
    text.append("  ")
    for role, share in status.time_split.items():
        text.append(f"{role} ", style=COLOURS[role]).append(f"{share:.0%} ")
    speed = status.metrics.get("throughput/env_steps_per_s")
    return text.append(f" {speed:,.0f} env steps/s", style="bold") if speed is not None else text
