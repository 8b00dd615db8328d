"""Report section of a run with a world model: the model's quality, and what it imagines."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from html import escape
from typing import Any

from vla_rl.cli.report.charts import metric_figure
from vla_rl.cli.report.gather import ReportData
from vla_rl.cli.report.html import render_section

OVER_ESTIMATION = "imagination/over_estimation"
METRICS = {
    OVER_ESTIMATION: "success over-estimation",
    "imagination/success_rate": "success of imagined episodes",
    "world_model/replay_auc": "AUC of success, episodes imagined again",
    "world_model/action_accuracy": "the right one of 8 chunks found",
    "world_model/changed_psnr/1": "dB of changed pixels, one chunk on",
    "world_model/outcome_auc": "AUC of success after a chunk",
}
UPDATE = re.compile("update_([0-9]{1,15})")
IMAGE_BYTES = 4_000_000
"""A larger image is not put into the page."""


def imagination_section(run: ReportData) -> str:
    """The section; nothing of a run without a world model."""
    if not run.metric_series("world_model/updates"):
        return ""
    return render_section("Imagination", _totals_table(run) + _metric_charts(run) + _image(run))


def _totals_table(run: ReportData) -> str:
    totals: Mapping[str, Any] = run.results.get("imagination") or {}
    real = sum(int(m.get("rollout/env_steps", 0)) for m in run.steps)
    imagined = sum(int(m.get("imagination/env_steps", 0)) for m in run.steps)
    paused = sum(1 for m in run.steps if m.get("imagination/paused"))
    rows = {
        "actions in the simulator": f"{real:,}",
        "imagined": f"{imagined:,}",
        "updates of the world model": f"{int(run.metric_series('world_model/updates')[-1][1]):,}",
        "seconds of fitting": f"{sum(m.get('time/fit', 0.0) for m in run.steps):,.0f}",
        "training steps without imagined episodes": f"{paused} of {len(run.steps)}",
    }
    if totals.get("paused"):
        rows["not in the last one, because"] = str(totals["paused"])
    body = "".join(
        f'<tr><td>{escape(title)}</td><td class="text">{escape(value)}</td></tr>' for title, value in rows.items()
    )
    return f'<div class="card scroll"><table>{body}</table></div>'


def _metric_charts(run: ReportData) -> str:
    figures = ""
    for name, label in METRICS.items():
        pairs = run.metric_series(name)
        if len(pairs) < 2:
            continue
        ends = [run.metric_series(f"{name}{end}") for end in ("_low", "_high")]
        figures += metric_figure(name, label, pairs, ends if all(ends) else ())
    note = (
        '<p class="note">Success over-estimation: how much more often the policy succeeds in the world model than in '
        "the simulator, from the same first frames; band: 95 % interval. The others are of episodes that the model was "
        "not fitted to.</p>"
    )
    return f'<div class="multiples">{figures}</div>{note}' if figures else ""


def _image(run: ReportData) -> str:
    images = [p for p in sorted((run.folder / "imagined").glob("update_*.png")) if UPDATE.fullmatch(p.stem)]
    if not images or images[-1].stat().st_size > IMAGE_BYTES:
        return ""
    data, updates = b64encode(images[-1].read_bytes()).decode(), int(images[-1].stem.partition("_")[2])
    note = (
        f"Held-out episodes after {updates:,} updates, chunk by chunk from left to right, cameras side by side: "
        "recorded, and below it imagined from the first frame on with the same actions."
    )
    return (
        f'<div class="card scroll"><img class="strip" alt="recorded and imagined episodes" '
        f'src="data:image/png;base64,{data}"></div><p class="note">{note}</p>'
    )
