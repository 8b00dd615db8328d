"""GRPO: group-relative advantages on fixed initial states, with the filters and the length normalisation of RLinf-VLA
(arXiv:2510.06710)."""

from __future__ import annotations

from typing import Any

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.algorithms.grpo.settings import GRPOConfig


def build(config: GRPOConfig, context: Context) -> Any:
    from vla_rl.plugins.algorithms.grpo.impl import GRPO

    return GRPO(config)


RECIPE = {
    "log_prob": "token",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": None,
    "entropy_coef": 0.0,
    "kl_coef": 0.0,
    "baseline": "mean",
    "normalize_by_std": True,
    "filter": {"lower": 0.1, "upper": 0.9},
    "filter_truncated": False,
}
PRESETS = {
    "paper": {**RECIPE, "aggregation": "trajectory-mean"},  # RLinf-VLA eq. 11-12, Table 3
    "rlinf": {**RECIPE, "aggregation": "rlinf"},  # its code
    "simplevla": {**RECIPE, "aggregation": "step-mean"},  # SimpleVLA-RL's code
}

plugin = Plugin(
    config=GRPOConfig, build=build, summary="group-relative policy optimisation (no critic)", presets=PRESETS
)
