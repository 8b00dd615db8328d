"""Settings of `ppo`."""

from __future__ import annotations

from attrs import frozen

from vla_rl.core.paths import read_table
from vla_rl.toolkit.algorithms.policy_gradient import ClipSettings, CorrectionSettings, CriticSettings

PRESETS = read_table(__file__, "presets.yaml")
"""Preset -> its keys, with their sources."""


@frozen(kw_only=True)
class PPOConfig(CriticSettings, ClipSettings, CorrectionSettings):
    """Spec keys of `ppo`: those of CriticSettings, ClipSettings and CorrectionSettings."""
