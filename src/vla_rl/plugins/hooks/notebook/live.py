"""Plot that is replaced as the run progresses."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

from vla_rl.core.events import Evaluation, Run
from vla_rl.plugins.hooks.notebook.config import NotebookConfig
from vla_rl.toolkit.hooks.curves import Interval, draw_curves, encode_png


class LiveCurves:
    """Live curves. Shows nothing outside of a notebook, so that a run started in one can be resumed elsewhere."""

    def __init__(self, config: NotebookConfig) -> None:
        self._config = config
        self._display: Any = None
        if in_notebook():
            import matplotlib.figure  # noqa: F401 - an error now, and not after the first step
            from IPython.display import DisplayHandle

            self._display = DisplayHandle()
        self._curves: dict[str, list[tuple[float, float]]] = {name: [] for name in config.metrics}
        self._evaluations: list[Interval] = []
        self._title = ""
        self._drawn = float("-inf")
        self._begun = False

    def on_run_start(self, run: Run) -> None:
        self._title = f"{run.name}: {run.first_step} of {run.steps} steps"
        self._run = run

    def on_update_end(self, step: int, metrics: dict[str, float]) -> None:
        for name, series in self._curves.items():
            if name in metrics:
                series.append((step, metrics[name]))
        self._title = f"{self._run.name}: {step} of {self._run.steps} steps"
        self._show_curves()

    def on_eval_end(self, step: int, evaluation: Evaluation) -> None:
        success = evaluation.success
        self._evaluations.append((step, success.rate, success.low, success.high))
        self._show_curves()

    def on_close(self) -> None:
        self._show_curves(last=True)

    def _show_curves(self, last: bool = False) -> None:
        if self._display is None or (not last and monotonic() - self._drawn < self._config.every_s):
            return
        from IPython.display import Image

        image = Image(encode_png(draw_curves(self._curves, self._evaluations, self._title)), format="png")
        (self._display.update if self._begun else self._display.display)(image)
        self._begun = True
        self._drawn = monotonic()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
