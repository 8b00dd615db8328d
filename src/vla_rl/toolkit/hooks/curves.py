"""Plots of a run's curves, for notebooks. Needs matplotlib (extra `notebook`)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

Series = Sequence[tuple[float, float]]
"""Points (step, value)."""
Interval = tuple[float, float, float, float]
"""Point with its interval: (step, rate, low, high)."""
SUCCESS = "env/success_rate"
ROLLOUT, EVALUATION = "#4c72b0", "#c44e52"


def draw_curves(curves: Mapping[str, Series], evaluations: Sequence[Interval], title: str = "") -> Any:
    """Plot a panel per metric, evaluations with intervals in that of success. Return a matplotlib Figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.2 * max(len(curves), 1), 2.8), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10)
    for number, (name, series) in enumerate(curves.items(), 1):
        panel = figure.add_subplot(1, len(curves), number)
        panel.set_title(name, fontsize=9, loc="left")
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.25)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        if series:
            label = "rollouts" if name == SUCCESS else None
            panel.plot(*zip(*series, strict=True), color=ROLLOUT, linewidth=1.2, label=label)
        if name == SUCCESS:
            panel.set_ylim(-0.03, 1.03)
            if evaluations:
                steps, rates, lows, highs = zip(*evaluations, strict=True)
                below = [rate - low for rate, low in zip(rates, lows, strict=True)]
                above = [high - rate for rate, high in zip(rates, highs, strict=True)]
                panel.errorbar(
                    steps, rates, [below, above], fmt="o", color=EVALUATION, capsize=2, markersize=4, label="evaluation"
                )
            if series or evaluations:
                panel.legend(fontsize=7, frameon=False)
    return figure


def encode_png(figure: Any) -> bytes:
    """Return a figure as PNG bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()
