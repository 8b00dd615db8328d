"""Status of a run for the console, computed from events and independent of how it is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from vla_rl.core.events import Evaluation, Rate, Run, wilson_interval

ROLES = ("env", "policy", "learner")
SMOOTHING = 0.3
VISIBLE = 0.01
"""Share of the roles' time from which the time of messages is shown."""


def format_duration(seconds: float | None) -> str:
    """Return a time as text: 3725 -> "1:02:05"; None -> "-"."""
    if seconds is None:
        return "-"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def format_rate(rate: Rate) -> str:
    return f"{100 * rate.rate:.1f} % [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"


def rate_style(rate: float, before: float | None) -> str:
    """Return rich's style of a success rate: green if it is better than before, red if it is worse."""
    past = before or 0.0
    return "bold green" if rate > past else "bold red" if rate < past else "bold"


class Status:
    """Current status of a run."""

    def __init__(
        self, run: Run, now: Callable[[], float] = time.monotonic, metric_patterns: Sequence[str] = ()
    ) -> None:
        self.run = run
        self._now = now
        self.metric_patterns = metric_patterns
        self.step = run.first_step
        self.phase = "starting"
        self.about = ""
        self.done = 0
        self.total = 0
        self._phase_started = self._last_line = now()
        self.metrics: dict[str, float] = {}
        self._announced: set[str] = set()
        self.history: list[float] = []
        """Success rate of each rollout, for the sparkline."""
        self.first_eval: Evaluation | None = None
        self.last_eval: Evaluation | None = None
        self.started = now()
        self._step_started = self.started
        self._step_seconds: float | None = None

    def note_progress(self, phase: str, done: int, total: int) -> None:
        phase, _, about = phase.partition(": ")
        if phase != self.phase:
            self._phase_started = self._now()
        self.phase = phase
        self.about = about
        self.done = done
        self.total = total

    @property
    def chosen_metrics(self) -> dict[str, str]:
        """Metrics selected by the key `metrics`: name -> formatted value."""
        names = [name for pattern in self.metric_patterns for name in self.metrics if fnmatchcase(name, pattern)]
        return {name: f"{self.metrics[name]:.3g}" for name in dict.fromkeys(names)}

    def find_unknown(self) -> list[str]:
        """Return the selected metrics that do not exist, each one once."""
        missing = [p for p in self.metric_patterns if not any(fnmatchcase(name, p) for name in self.metrics)]
        new = [pattern for pattern in missing if pattern not in self._announced and "loss/policy" in self.metrics]
        self._announced.update(new)
        return new

    def line_printed(self) -> None:
        """Record that a line was printed."""
        self._last_line = self._now()

    @property
    def seconds_silent(self) -> float:
        """Seconds since the last line, or since the phase began if that was later."""
        return self._now() - max(self._last_line, self._phase_started)

    @property
    def in_phase(self) -> float:
        """Seconds since the current phase began."""
        return self._now() - self._phase_started

    def note_update(self, step: int, metrics: dict[str, float]) -> None:
        now = self._now()
        seconds = now - self._step_started
        self._step_started = now
        if step > self.run.first_step:  # step 0 is behaviour cloning before RL
            past, seconds = self._step_seconds, seconds / (step - self.step)
            self._step_seconds = seconds if past is None else (1 - SMOOTHING) * past + SMOOTHING * seconds
        self.step = step
        self.metrics = metrics
        if "env/success_rate" in metrics:
            self.history.append(metrics["env/success_rate"])

    def note_evaluation(self, evaluation: Evaluation) -> None:
        self.first_eval = self.first_eval or evaluation
        self.last_eval = evaluation
        if evaluation.step == self.run.first_step:
            self._step_started = self._now()

    @property
    def eval_style(self) -> str:
        """Style of the last evaluation's success, compared with the first one's."""
        assert self.first_eval is not None and self.last_eval is not None
        first = None if self.first_eval is self.last_eval else self.first_eval.success.rate
        return rate_style(self.last_eval.success.rate, first)

    @property
    def elapsed_s(self) -> float:
        return self._now() - self.started

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds to the end, at the speed of the last steps; None before the first step."""
        if self._step_seconds is None:
            return None
        left = (self.run.steps - self.step) * self._step_seconds
        return max(0.0, left - (self._now() - self._step_started))

    @property
    def success_rate(self) -> Rate | None:
        """Success rate of the last rollout; None without finished episodes."""
        rate, n = self.metrics.get("env/success_rate"), self.metrics.get("rollout/episodes", 0)
        if rate is None or not n:
            return None
        return wilson_interval(round(rate * n), int(n))

    @property
    def time_split(self) -> dict[str, float]:
        """Shares of env, policy and learner in the time of the last step, and of messages between processes, which have
        what is left unless roles work at the same time; empty when unknown."""
        seconds = {role: max(0.0, self.metrics.get(f"time/{role}", 0.0)) for role in ROLES}
        working = sum(seconds.values())
        idle = self.metrics.get("time/step", 0.0) - self.metrics.get("time/imagination", 0.0) - working
        if idle > VISIBLE * working:
            seconds["messages"] = idle
        total = sum(seconds.values()) if working else 0.0
        return {role: s / total for role, s in seconds.items()} if total else {}
