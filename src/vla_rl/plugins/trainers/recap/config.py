"""Settings of `recap`."""

from __future__ import annotations

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.spec.sections import number_between, positive_between
from vla_rl.toolkit.trainers.settings import CriticWarmupSettings


@frozen(kw_only=True)
class RecapConfig(CriticWarmupSettings):
    """Spec keys of the trainer `recap`."""

    critic_steps: int = field(default=200, validator=number_between(1, 1_000_000_000))
    """First optimiser steps, which train the value function alone; fewer than `imitation.steps`. After them the samples
    are labelled, once."""
    positive_share: float = field(default=0.4, validator=v.and_(v.gt(0.0), v.lt(1.0)))
    """Share of each task's samples, those with the largest advantages, that are labelled positive, above 0 and
    below 1."""
    horizon: int | None = field(default=None, validator=v.optional(number_between(1, 1_000_000)))
    """Chunks after which an advantage bootstraps from the value function. Null: never, the recorded return counts to
    the end of the episode."""
    dropout: float = field(default=0.3, validator=v.and_(v.ge(0.0), v.lt(1.0)))
    """Probability that a sample is trained on without its label, 0 to below 1, so that the policy also acts without
    one."""
    discount: float = field(default=0.99, validator=positive_between(0.0, 1.0))
    """Discount of rewards per environment step, above 0, at most 1."""
    atoms: int = field(default=201, validator=number_between(2, 10_000))
    """Returns of the value function's distribution, evenly spaced from the lowest to the highest recorded one."""
    lr: float = field(default=3e-4, validator=positive_between(1e-12, 10))
    """Learning rate of the value function (Adam)."""
