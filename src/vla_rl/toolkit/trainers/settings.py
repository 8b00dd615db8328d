"""Settings that several trainers share; a trainer's config class inherits them. Cheap to import."""

from __future__ import annotations

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.spec.sections import number_between


@frozen(kw_only=True, slots=False)
class CriticWarmupSettings:
    """Setting of trainers of demonstrations that train critics before the policy."""

    critic_steps: int = field(default=0, validator=number_between(0, 1_000_000_000))
    """First optimiser steps, which train the critics alone; fewer than `imitation.steps`."""


@frozen(kw_only=True)
class DemonstrationShare:
    """Recorded demonstrations in each batch of a trainer of transitions."""

    share: float = field(validator=v.and_(v.gt(0.0), v.lt(1.0)))
    """Share of each batch that comes from demonstrations (`imitation.data`); 0.5 in RLPD (symmetric sampling)."""


@frozen(kw_only=True, slots=False)
class DemonstrationSettings:
    """Setting of trainers of transitions that learn from recorded demonstrations, too."""

    demonstrations: DemonstrationShare | None = None
    """Demonstrations in each batch; null: none."""
