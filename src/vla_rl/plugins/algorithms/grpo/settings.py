"""What a spec says about the algorithm; light to import."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.toolkit.algorithms.settings import ClipSettings, CorrectionSettings, GroupSettings


@frozen(kw_only=True)
class SoftGate:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): a sigmoid of the ratio in place of the clip."""

    positive: float = field(default=1.0, validator=v.gt(0))
    """tau of entries with a positive advantage: how fast their gradient fades as the ratio leaves 1."""
    negative: float = field(default=1.05, validator=v.gt(0))
    """tau of the others."""


@frozen(kw_only=True)
class GRPOConfig(GroupSettings, ClipSettings, CorrectionSettings):
    advantage: Literal["chunk"] = "chunk"
    """GRPO has one advantage a trajectory, so one a chunk."""
    correction: Literal["none", "decoupled", "truncated"] = "none"
    """How data of older versions count, as in ppo; v-trace corrects values, and there are none here."""
    soft_gate: SoftGate | None = field(default=None)
    """Set, it replaces the clip, and no entry loses all its gradient."""

    @soft_gate.validator
    def _no_clip(self, _: object, gate: SoftGate | None) -> None:
        if gate is not None and (self.clip_low, self.clip_high, self.dual_clip) != (0.2, 0.28, None):
            raise ValueError("soft_gate takes the place of the clip; leave clip_low, clip_high and dual_clip out")
