"""`recap`: learns from recordings with rewards, good and bad, by advantage-conditioned cloning (RECAP, Physical
Intelligence 2025)."""

from __future__ import annotations

from vla_rl.core.declarations import TrainerPlugin, TrainingData
from vla_rl.plugins.trainers.recap.label import POSITIVE

plugin = TrainerPlugin(
    config="vla_rl.plugins.trainers.recap.config:RecapConfig",
    build="vla_rl.plugins.trainers.recap.impl:Recap",
    summary="learns from recordings with rewards by advantage-conditioned cloning (RECAP)",
    trains_on=TrainingData.RECORDINGS,
    instruction_suffix=POSITIVE,
)
