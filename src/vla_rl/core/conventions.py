"""Conventions: keys of a spec that say how a policy was trained, of which a wrong one lowers its success and raises no
error. `vla-rl identify` finds their values from demonstrations. Cheap to import.

A key is declared as one where it is defined, in core's sections and in a plugin's settings alike:

    gripper: str = field(default="keep", validator=in_(GRIPPERS), metadata=convention(GRIPPERS))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, permutations
from typing import Any

from attrs import frozen

from vla_rl.core.types import EnvInfo

METADATA = "convention"
"""Key of a field's metadata."""
MOST_ORDERS = 24
"""Orders of cameras that are tried."""
CAMERA_EVIDENCE = "demonstrations in which the cameras see different things"
GRIPPER_EVIDENCE = "demonstrations in which the gripper opens and closes, or episodes (--episodes)"
Values = Sequence[Any] | Callable[[Any, EnvInfo], Sequence[Any]]


@frozen(kw_only=True)
class Convention:
    """What is known of a key that is a convention."""

    values: Values
    """Values that it may have; or a function (settings, simulator) that returns those one step from the present one."""
    trades_with: tuple[str, ...] = ()
    """Other keys of the spec, such as `conventions.state_negated`, that together with it may change nothing."""
    evidence: str = "more frames, or episodes (--episodes)"
    """What tells its values apart where demonstrations do not, in words."""
    of_actions: bool = False
    """It converts the actions that a policy gave (`conventions:`), so that trying a value costs no forward pass."""

    def list_values(self, config: Any, info: EnvInfo) -> list[Any]:
        """Return the values to try with these settings."""
        return list(self.values(config, info) if callable(self.values) else self.values)


def convention(values: Values, **about: Any) -> dict[str, Any]:
    """Return the metadata of an attrs field that is a convention. Arguments are the attributes of `Convention`."""
    return {METADATA: Convention(values=values, **about)}


def order_cameras(config: Any, info: EnvInfo) -> list[tuple[str, ...]]:
    """Return the orders in which a model may see as many cameras as `config.cameras` has, all if that is None."""
    count = len(config.cameras or info.cameras)
    return list(permutations(info.cameras, count))[:MOST_ORDERS]


def reorder_numbers(what: str) -> Values:
    """Return the values of `WHAT_order`, of `state` or `action`, one step from the present one (empty: as they are),
    which is the first: two numbers change places, or one goes from an end to the other."""

    def list_orders(config: Any, info: EnvInfo) -> list[tuple[int, ...]]:
        usual = tuple(range(getattr(info, f"{what}_dim")))
        now = tuple(getattr(config, f"{what}_order")) or usual
        steps = [now, now[1:] + now[:1], now[-1:] + now[:-1]]
        for first, second in combinations(usual, 2):
            swapped = list(now)
            swapped[first], swapped[second] = swapped[second], swapped[first]
            steps.append(tuple(swapped))
        return [() if one == usual else one for one in dict.fromkeys(steps)]

    return list_orders


def negate_numbers(what: str) -> Values:
    """Return the values of `WHAT_negated`: the present one, and those with one number more or less."""

    def list_choices(config: Any, info: EnvInfo) -> list[tuple[int, ...]]:
        now = getattr(config, f"{what}_negated")
        return [tuple(now), *(tuple(sorted({*now} ^ {number})) for number in range(getattr(info, f"{what}_dim")))]

    return list_choices
