"""Check that an algorithm scores parts of a step as it scores the whole step, as `AdvantageScope.GROUP` promises."""

from __future__ import annotations

import numpy as np

from vla_rl.core.errors import PluginError
from vla_rl.core.fields import ADVANTAGES
from vla_rl.core.hookspecs import Algorithm
from vla_rl.runtime.driver.collecting.assembler import RolloutSamples

TOLERANCE = 1e-3
"""Tolerance of the comparison between parts and the whole step, relative to the largest value. Sums of rewards are
rounded differently where trajectories are longer, and the division by a small standard deviation amplifies that.
"""
OTHER_SELECTION = "`select` keeps other trajectories of the whole step than of parts of it"


def check_parts(name: str, algorithm: Algorithm, parts: RolloutSamples, step: RolloutSamples) -> None:
    """Raise PluginError unless the parts are the first samples of the whole step, with the same scores. `name`: type of
    the algorithm.
    """
    count = len(parts)
    same = count <= len(step) and all(
        np.array_equal(getattr(parts, key), getattr(step, key)[:count]) for key in ("numbers", "steps")
    )
    if not same:
        raise scope_error(name, OTHER_SELECTION)
    for key in (*(field.name for field in ADVANTAGES if field.in_batch), *algorithm.extras):
        of_parts = parts.fields[key]
        of_step = step.fields[key]
        if of_parts is None and of_step is None:
            continue
        if of_parts is None or of_step is None:
            raise scope_error(name, f"there are {key} of the whole step or of its parts, and not of both")
        largest = float(np.abs(of_step).max(initial=0.0))
        difference = float(np.abs(of_parts - of_step[:count]).max(initial=0.0))
        if difference > TOLERANCE * largest:
            raise scope_error(name, f"{key} of parts differ by up to {difference:.3g} from those of the whole step")


def scope_error(name: str, reason: str) -> PluginError:
    """Return the error for an algorithm of this type that scores parts of a step differently."""
    return PluginError(
        f"algorithm {name!r} says advantage_scope GROUP, and needs other groups: {reason} (or a wrapper around it "
        f"does); the weights are unchanged. Set advantage_scope = AdvantageScope.STEP in it, or "
        f"asynchrony.streaming_update: false"
    )
