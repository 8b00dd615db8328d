"""Quality of the world model: how much it over-estimates the policy's success, and whether it is good enough to train
in."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from vla_rl.core.spec.sections import ImaginationSpec
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import RolloutInterface
from vla_rl.runtime.driver.evaluation.evaluator import split_over_policies
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.imagination.interfaces import IMAGINED, MEASURING
from vla_rl.runtime.imagination.messages import FitResult
from vla_rl.runtime.messages.ids import IMAGINED_GROUPS
from vla_rl.runtime.messages.requests import EpisodeRequest

NORMAL_QUANTILE = 1.96
"""Quantile of the normal distribution for a two-sided 95 % interval."""


def reason_to_pause(section: ImaginationSpec, step: int, fit: FitResult, metrics: Mapping[str, float]) -> str:
    """Return the reason why nothing is imagined in this step; "" where something is. `metrics`: as of
    `measure_over_estimation`."""
    if step <= section.warm_start:
        return f"the first {section.warm_start} training steps are real only (imagination.warm_start)"
    thresholds = section.quality_thresholds
    if thresholds is None:
        return ""
    not_met = [name for name, met in fit.thresholds_met.items() if not met]
    if not_met:
        return f"the world model is not good enough yet on held-out episodes: {', '.join(not_met)}"
    low = metrics.get("imagination/over_estimation_low", math.inf)
    if low > thresholds.max_over_estimation:
        return (
            f"the policy succeeds more often in the world model than in the simulator, by at least {low:.2f} "
            f"(imagination.quality_thresholds.max_over_estimation: {thresholds.max_over_estimation:g})"
        )
    return ""


def measure_over_estimation(
    fleet: Fleet, section: ImaginationSpec, step: int, fit: FitResult, fault_log: FaultLog
) -> dict[str, float]:
    """Return how much more often the policy succeeds in the world model than in the last rollout from the same first
    frames, with the 95 % interval of the mean difference."""
    if not fit.last_episodes:
        return {}
    first_number = IMAGINED_GROUPS + step * section.evaluated_episodes
    requests = [
        EpisodeRequest(state=state, number=first_number + i, world=fit.version)
        for i, (state, _) in enumerate(fit.last_episodes)
    ]
    reports = fleet.get_all(
        [
            fleet.rollouts[policy.worker_index].call(
                RolloutInterface.evaluate_in_background, share, MEASURING, IMAGINED
            )
            for policy, share in split_over_policies(fleet, requests)
        ]
    )
    for report in reports:
        fault_log.report_faults(report.faults)
    trajectories = [trajectory.env_part for report in reports for trajectory in report.collected]
    imagined = {trajectory.number: trajectory.episodes[0].success_once for trajectory in trajectories}
    pairs = zip(requests, fit.last_episodes, strict=True)
    differences = np.array([imagined[request.number] - real for request, (_, real) in pairs], np.float64)
    count = len(differences)
    mean = float(differences.mean())
    half = NORMAL_QUANTILE * float(differences.std(ddof=1)) / count**0.5 if count > 1 else math.inf
    interval = {"": mean, "_low": mean - half, "_high": mean + half}
    return {f"imagination/over_estimation{end}": value for end, value in interval.items() if math.isfinite(value)}
