"""Settings of `ppo`."""

from __future__ import annotations

from pathlib import Path

import yaml
from attrs import frozen

from vla_rl.toolkit.algorithms.policy_gradient import ClipSettings, CorrectionSettings, CriticSettings

PRESETS = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text("utf-8"))
"""Preset -> its keys, with their sources."""


@frozen(kw_only=True)
class PPOConfig(CriticSettings, ClipSettings, CorrectionSettings):
    """Spec keys of `ppo`: those of CriticSettings, ClipSettings and CorrectionSettings."""
