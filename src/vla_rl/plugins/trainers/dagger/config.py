"""Settings of `dagger`."""

from __future__ import annotations

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.augmentation import AugmentSpec
from vla_rl.core.spec.sections import number_between


@frozen(kw_only=True)
class AggregationSettings:
    """Keys of trainers that aggregate labelled observations and clone all of them."""

    updates: int = field(default=100, validator=number_between(1, 1_000_000))
    """Optimiser steps of cloning after each rollout, on all data so far."""
    batch: int = field(default=64, validator=number_between(1, 1_000_000))
    """Samples of an optimiser step, drawn uniformly from demonstrations (`imitation.data`) and labelled chunks."""
    capacity: int = field(default=100_000, validator=number_between(1, 1_000_000_000))
    """Labelled chunks that are kept; the oldest ones are forgotten."""
    augment: AugmentSpec | None = None
    """Random changes of the images; null: none."""


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


def decay_beta(config: DaggerConfig, step: int) -> float:
    """Return the probability that the expert acts in a training step, from 1: `expert_share` of `dagger`."""
    return float(config.beta * config.beta_decay ** (step - 1))
