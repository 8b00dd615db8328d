"""`off_policy`: soft actor-critic (SAC) on transitions that it keeps, with the options of RLPD. `dsrl`: the same over
the initial noise of a frozen flow policy."""

from __future__ import annotations

from vla_rl.core.declarations import TrainerPlugin, TrainingData

plugin = TrainerPlugin(
    config="vla_rl.plugins.trainers.off_policy.config:OffPolicyConfig",
    build="vla_rl.plugins.trainers.off_policy.impl:OffPolicy",
    summary="learns from transitions that it keeps (SAC, RLPD)",
    trains_on=TrainingData.TRANSITIONS,
)
dsrl = TrainerPlugin(
    config="vla_rl.plugins.trainers.off_policy.config:DsrlConfig",
    build="vla_rl.plugins.trainers.off_policy.steering:Dsrl",
    summary="steers a frozen flow policy by its initial noise (DSRL)",
    trains_on=TrainingData.TRANSITIONS,
)
