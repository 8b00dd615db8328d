"""`dagger` and `hg_dagger`: the policy clones an expert, or a person, on what the policy itself visits."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.augmentation import AugmentSpec
from vla_rl.core.spec.sections import between
from vla_rl.core.types import Context, Plugin, TrainingData


@frozen(kw_only=True)
class AggregationSettings:
    """Keys of trainers that aggregate labelled observations and clone all of them."""

    updates: int = field(default=100, validator=between(1, 1_000_000))
    """Optimiser steps of cloning after each rollout, on all data so far."""
    batch: int = field(default=64, validator=between(1, 1_000_000))
    """Samples of an optimiser step, drawn uniformly from demonstrations (`imitation.data`) and labelled chunks."""
    capacity: int = field(default=100_000, validator=between(1, 1_000_000_000))
    """Labelled chunks that are kept; the oldest ones are forgotten."""
    augment: AugmentSpec | None = None
    """Random changes of the pictures; null: none."""


@frozen(kw_only=True)
class DaggerConfig(AggregationSettings):
    """Spec keys of the trainer `dagger`."""

    beta: float = field(default=1.0, validator=[v.ge(0.0), v.le(1.0)])
    """Probability that the expert acts in a chunk instead of the policy, in the first training step; 0 to 1."""
    beta_decay: float = field(default=0.0, validator=[v.ge(0.0), v.le(1.0)])
    """Factor of this probability from one training step to the next, 0 to 1. 0: from the second step on the policy
    acts alone (the parameter-free schedule of Ross et al. 2011)."""


@frozen(kw_only=True)
class HGDaggerConfig(AggregationSettings):
    """Spec keys of the trainer `hg_dagger`."""


def beta_of(config: DaggerConfig, step: int) -> float:
    """Return the probability that the expert acts in a training step, from 1."""
    return float(config.beta * config.beta_decay ** (step - 1))


def build_dagger(config: DaggerConfig, context: Context) -> Any:
    from vla_rl.plugins.trainers.dagger.impl import Dagger

    return Dagger(config, context)


def build_hg_dagger(config: HGDaggerConfig, context: Context) -> Any:
    from vla_rl.plugins.trainers.dagger.impl import HGDagger

    return HGDagger(config, context)


dagger = Plugin(
    config=DaggerConfig,
    build=build_dagger,
    summary="clones the simulator's expert on what the policy visits (DAgger)",
    trains_on=TrainingData.TRANSITIONS,
    expert_share=beta_of,
)
hg_dagger = Plugin(
    config=HGDaggerConfig,
    build=build_hg_dagger,
    summary="clones whoever takes over from the policy (HG-DAgger)",
    trains_on=TrainingData.TRANSITIONS,
)
