"""Append-only file of metrics that looks the same whether or not the run was killed and resumed."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from vla_rl.core.events import Evaluation, Run, robot_metrics
from vla_rl.core.paths import own_copy
from vla_rl.plugins.hooks.jsonl.config import JsonlConfig

logger = logging.getLogger(__name__)

EVAL = "eval/success_rate"


class JsonlWriter:
    """Writes `{"step": n, metrics...}` after each update and `{"step": n, "eval/...": ...}` after each evaluation.
    Every line is on disk before the run continues. NaN and infinities, which JSON lacks, are written as null."""

    def __init__(self, config: JsonlConfig) -> None:
        self._name = config.file
        self._file: IO[str] | None = None
        self._path = Path()
        self._first_step = 0

    def on_run_start(self, run: Run) -> None:
        self._path = Path(run.folder) / self._name
        self._first_step = run.first_step
        own_copy(self._path)
        if run.first_step == 0:
            self._keep_copy()
        self._keep_lines(lambda line: line["step"] <= run.first_step)

    def on_update_end(self, step: int, metrics: dict[str, float]) -> None:
        self._forget_step(step, is_eval=False)
        self._append_line({"step": step, **metrics})

    def on_eval_end(self, step: int, evaluation: Evaluation) -> None:
        self._forget_step(step, is_eval=True)
        success = evaluation.success
        self._append_line(
            {
                "step": step,
                EVAL: success.rate,
                "eval/success_low": success.low,
                "eval/success_high": success.high,
                "eval/episodes": success.n,
                "eval/repeats": list(evaluation.repeats),
                **{f"eval/task/{name}": rate.rate for name, rate in evaluation.tasks.items()},
                **robot_metrics("eval", evaluation.episodes),
                "time/eval": evaluation.seconds,
            }
        )

    def on_close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append_line(self, line: dict[str, Any]) -> None:
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps({name: _to_finite(value) for name, value in line.items()}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _forget_step(self, step: int, is_eval: bool) -> None:
        """Drop lines of a killed run for the step that this run resumes from, when its line is written again."""
        if step <= self._first_step:
            self._keep_lines(lambda line: line["step"] != step or (EVAL in line) != is_eval)

    def _keep_copy(self) -> None:
        """Copy the file of an earlier attempt that left no checkpoint."""
        if not self._path.exists():
            return
        lines = map(_parse_line, self._path.read_text(encoding="utf-8", errors="replace").splitlines())
        if any(line is not None and line["step"] > 0 for line in lines):
            names = (self._path.with_stem(f"{self._path.stem}-{n}") for n in itertools.count(1))
            copy = next(name for name in names if not name.exists())
            shutil.copyfile(self._path, copy)
            logger.warning("the metrics of the attempt before are kept in %s", copy)

    def _keep_lines(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Drop unwanted lines and a line that a kill left half written; write only if that changes the file."""
        if not self._path.exists():
            return
        text = self._path.read_text(encoding="utf-8", errors="replace")
        remaining = "".join(
            f"{raw}\n" for raw in text.splitlines() if (line := _parse_line(raw)) is not None and keep(line)
        )
        if remaining == text:
            return
        self.on_close()
        partial = self._path.with_name(f".{self._path.name}.partial")  # a name that no hook may have
        partial.write_text(remaining, encoding="utf-8")
        partial.replace(self._path)


def _parse_line(raw: str) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _to_finite(value: Any) -> Any:
    if isinstance(value, (int, str, list)):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
