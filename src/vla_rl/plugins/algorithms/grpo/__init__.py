"""GRPO: group-relative advantages on fixed initial states, with P0's filters and length normalisation."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class Filter:
    """Keep a group only if its mean success lies in [lower, upper] (RLinf-VLA 4.3.3)."""

    lower: float = field(default=0.1, validator=[v.ge(0), v.le(1)])
    """Lowest mean success of a group that is kept, in [0, 1]."""
    upper: float = field(default=0.9, validator=[v.ge(0), v.le(1)])
    """Highest mean success of a group that is kept, in [0, 1]."""

    @upper.validator
    def _ordered(self, _: object, upper: float) -> None:
        if self.lower > upper:
            raise ValueError(f"filter.lower ({self.lower}) is above filter.upper ({upper})")


@frozen(kw_only=True)
class GRPOConfig:
    clip_low: float = field(default=0.2, validator=[v.ge(0), v.lt(1)])
    """Ratios below 1 - clip_low get no gradient."""
    clip_high: float = field(default=0.28, validator=v.gt(0))
    """Ratios above 1 + clip_high get no gradient (clip-higher, DAPO 2025)."""
    dual_clip: float | None = field(default=None, validator=v.optional(v.gt(1)))
    """Bounds the loss of negative advantages by this factor; null: off."""
    log_prob: Literal["token", "action", "chunk"] = "token"
    """Granularity of the probability ratio."""
    advantage: Literal["chunk"] = "chunk"
    """GRPO has one advantage a trajectory, so one a chunk."""
    aggregation: Literal["trajectory-mean", "step-mean", "rlinf"] = "trajectory-mean"
    """How entries of the loss are averaged; trajectory-mean weighs every trajectory alike (RLinf-VLA eq. 12)."""
    normalize_by_std: bool = True
    """false gives Dr. GRPO."""
    filter: Filter | None = None
    """Success-rate filter of groups; null: off."""
    filter_identical: bool = True
    """Drop groups whose scores are all equal; they have no gradient."""
    filter_truncated: bool = False
    """Drop groups in which any member hit the step limit."""
    entropy_coef: float = field(default=0.0, validator=v.ge(0))
    """Weight of the entropy bonus, at the granularity of the ratio."""


def build(config: GRPOConfig, context: Context) -> Any:
    from vla_rl.plugins.algorithms.grpo.impl import GRPO

    return GRPO(config)


plugin = Plugin(config=GRPOConfig, build=build, summary="group-relative policy optimisation (no critic)")
