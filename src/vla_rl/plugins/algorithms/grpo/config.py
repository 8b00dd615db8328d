"""Spec keys of `grpo`; light to import, since specs are read with it."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.paths import read_table
from vla_rl.toolkit.algorithms.policy_gradient import (
    ClipSettings,
    CorrectionSettings,
    Decoupled,
    GroupSettings,
    Truncated,
)

PRESETS = read_table(__file__, "presets.yaml")
"""Preset -> its keys, with their sources."""


@frozen(kw_only=True)
class SoftGate:
    """SAPO's soft gate (Gao et al. 2025, arXiv:2511.20347): a sigmoid of the probability ratio instead of the clip."""

    positive: float = field(default=1.0, validator=v.gt(0))
    """Temperature tau, above 0, of loss terms with a positive advantage: how fast their gradient fades as the ratio
    leaves 1."""
    negative: float = field(default=1.05, validator=v.gt(0))
    """Temperature tau, above 0, of the other loss terms; larger than `positive` by default, as in SAPO."""


@frozen(kw_only=True)
class GRPOConfig(GroupSettings, ClipSettings, CorrectionSettings):
    """Spec keys of `grpo`, with those of GroupSettings, ClipSettings and CorrectionSettings."""

    advantage: Literal["chunk"] = "chunk"
    """Granularity of advantages. GRPO has one advantage per trajectory, so one per chunk is all there is."""
    correction: Decoupled | Truncated | None = None
    """Off-policy correction for samples of older policy versions, as in `ppo`; null: none. There is no v-trace: it
    corrects values, and GRPO has no critic."""
    soft_gate: SoftGate | None = field(default=None)
    """Soft gate that replaces the clip, so that no loss term loses all its gradient; null: clip."""

    @soft_gate.validator
    def _no_clip(self, _: object, gate: SoftGate | None) -> None:
        if gate is not None and (self.clip_low, self.clip_high, self.dual_clip) != (0.2, 0.28, None):
            raise ValueError("soft_gate takes the place of the clip; leave clip_low, clip_high and dual_clip out")
