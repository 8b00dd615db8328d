"""Python's view of a run, finished or still running in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.cli.report.gather import ReportData, find_run_spec, read_report_data
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Array
from vla_rl.runtime.run_folder.spec_file import load_run_spec

if TYPE_CHECKING:
    from vla_rl.serving.policy import Policy

PLOTTED = ("env/success_rate", "loss/policy")


class RunRecord:
    """The content of a run folder. It is read on first access; `reload` reads it again."""

    def __init__(self, folder: Path | str) -> None:
        """Raises UserError where the folder holds no run."""
        self.folder = Path(folder)
        find_run_spec(self.folder)

    def reload(self) -> RunRecord:
        """This run as it is by now."""
        return RunRecord(self.folder)

    @cached_property
    def _read(self) -> ReportData:
        return read_report_data(self.folder)

    @cached_property
    def spec(self) -> Spec:
        return load_run_spec(self.folder)

    @property
    def results(self) -> Mapping[str, Any]:
        """Content of results.json: "success" {"rate", "low", "high", "n"}, "success_before", "tasks" and so on. Empty
        until the run has ended."""
        return self._read.results

    @cached_property
    def metrics(self) -> Mapping[str, Array]:
        """Metric -> float64 [steps], NaN where a step lacks it, and "step" -> int64 [steps]. Written by the hook
        `jsonl`; empty without."""
        steps = self._read.steps
        names = sorted({name for step in steps for name, value in step.items() if isinstance(value, int | float)})
        series = {name: np.array([step.get(name, np.nan) for step in steps], np.float64) for name in names}
        return {**series, "step": np.array([step["step"] for step in steps], np.int64)}

    @cached_property
    def evaluations(self) -> Mapping[str, Array]:
        """ "step", "rate", "low", "high" (of the 95 % interval) and "n" -> arrays [evaluations]."""
        points = self._read.evaluations
        return {name: np.array([getattr(p, name) for p in points]) for name in ("step", "rate", "low", "high", "n")}

    @property
    def videos(self) -> Sequence[Path]:
        """Films of episodes, the newest evaluation first."""
        return self._read.videos

    @property
    def checkpoint(self) -> Path:
        """The newest one. Raises UserError if the run has none."""
        from vla_rl.runtime.run_folder.folder import checkpoint_in

        return checkpoint_in(self.folder)

    def policy(self, **settings: Any) -> Policy:
        """The newest checkpoint, ready to act: `open_policy`."""
        from vla_rl.serving.policy import open_policy

        return open_policy(self.folder, **settings)

    def plot(self, metrics: Sequence[str] = PLOTTED) -> Any:
        """A matplotlib Figure with a panel a metric (extra `notebook`). Raises UserError for a metric that is not
        there, and without matplotlib."""
        from vla_rl.core.errors import did_you_mean
        from vla_rl.core.installation import OWN_DIST
        from vla_rl.core.requirements import install_command
        from vla_rl.toolkit.hooks.curves import draw_curves

        for name in metrics:
            if name not in self.metrics and name not in PLOTTED:
                raise UserError(f"{self.folder} has no metric {name!r}{did_you_mean(name, self.metrics)}")
        points = self._read.evaluations
        curves = {name: self._read.metric_series(name) for name in metrics}
        try:
            return draw_curves(curves, [(p.step, p.rate, p.low, p.high) for p in points], str(self.spec.name))
        except ModuleNotFoundError as exc:
            raise UserError(f"plots need {exc.name!r}; try: {install_command(OWN_DIST, 'notebook')}") from exc

    def __repr__(self) -> str:
        success = self.results.get("success")
        if success:
            low, high = (100 * success[name] for name in ("low", "high"))
            outcome = f"success {100 * success['rate']:.1f} % [{low:.1f}, {high:.1f}] of {success['n']} episodes"
        else:
            outcome = f"{len(self._read.steps)} steps, not at its end"
        return f"RunRecord({str(self.folder)!r}: {outcome})"
