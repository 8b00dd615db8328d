"""`dagger` and `hg_dagger`: the policy clones an expert, or a person, on what the policy itself visits."""

from __future__ import annotations

from vla_rl.core.declarations import TrainerPlugin, TrainingData

dagger = TrainerPlugin(
    config="vla_rl.plugins.trainers.dagger.config:DaggerConfig",
    build="vla_rl.plugins.trainers.dagger.impl:Dagger",
    summary="clones the simulator's expert on what the policy visits (DAgger)",
    trains_on=TrainingData.TRANSITIONS,
    expert_share="vla_rl.plugins.trainers.dagger.config:decay_beta",
)
hg_dagger = TrainerPlugin(
    config="vla_rl.plugins.trainers.dagger.config:HGDaggerConfig",
    build="vla_rl.plugins.trainers.dagger.impl:HGDagger",
    summary="clones whoever takes over from the policy (HG-DAgger)",
    trains_on=TrainingData.TRANSITIONS,
)
