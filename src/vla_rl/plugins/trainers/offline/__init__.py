"""`offline`: learns from recordings with rewards, good and bad, by advantage-weighted cloning (AWR, IQL)."""

from __future__ import annotations

from vla_rl.core.declarations import TrainerPlugin, TrainingData

plugin = TrainerPlugin(
    config="vla_rl.plugins.trainers.offline.config:OfflineConfig",
    build="vla_rl.plugins.trainers.offline.impl:Offline",
    summary="learns from recordings with rewards (AWR, IQL)",
    trains_on=TrainingData.RECORDINGS,
)
