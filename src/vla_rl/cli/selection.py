"""Success of a checkpoint that was chosen by evaluations on the same states: the best of many is better than it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

from attrs import asdict

from vla_rl.cli.report.gather import read_report_data
from vla_rl.core.errors import UserError
from vla_rl.core.events import wilson_interval

ERROR = 0.05


def describe_selection(checkpoint: Path | None, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return among how many evaluations of the run a checkpoint was the best, and its interval corrected for so many
    (Bonferroni): each of their intervals holds with 95 % at once. None: it was not chosen, as the last of a run is
    not."""
    if checkpoint is None:
        return None
    try:
        run = read_report_data(checkpoint.resolve().parents[1])
    except (UserError, OSError):
        return None
    step, n = result["step"], result["success"]["n"]
    rates = {point.step: point.rate for point in run.evaluations if point.n == n}  # of the same states
    if len(rates) < 2 or step == run.evaluations[-1].step or rates.get(step, -1.0) < max(rates.values()):
        return None
    z = NormalDist().inv_cdf(1 - ERROR / len(rates) / 2)
    corrected = wilson_interval(round(result["success"]["rate"] * n), n, z)
    return {"evaluations": len(rates), "steps": sorted(rates), "corrected": asdict(corrected)}


def describe_choice(selection: Mapping[str, Any]) -> str:
    """Return what a selection means, in one line."""
    corrected = selection["corrected"]
    return (
        f"the best of {selection['evaluations']} evaluations of its run on these states; corrected for the choice its "
        f"interval is [{100 * corrected['low']:.1f}, {100 * corrected['high']:.1f}]; other states would say more"
    )
