"""Settings that several trainers share; a trainer's config class inherits them. Cheap to import."""

from __future__ import annotations

from attrs import field, frozen

from vla_rl.core.spec.sections import between


@frozen(kw_only=True, slots=False)
class CriticWarmupSettings:
    """Setting of trainers of demonstrations that train critics before the policy."""

    critic_steps: int = field(default=0, validator=between(0, 1_000_000_000))
    """First optimiser steps, which train the critics alone; fewer than `imitation.steps`."""
