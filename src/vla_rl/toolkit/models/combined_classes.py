"""Classes of policies whose settings decide about their capabilities (`vla_rl.core.capabilities`)."""

from __future__ import annotations

from functools import cache
from typing import TypeVar, cast

P = TypeVar("P")


def combine_classes(policy: type[P], *parts: type) -> type[P]:
    """Return the class of a policy with these parts: classes that inherit a common base of all policies of a family,
    and a capability. Their methods take precedence over those of `policy`. Equal arguments give the same class.
    """
    known: type = policy
    return cast("type[P]", _make_class(known, parts)) if parts else policy


@cache
def _make_class(policy: type, parts: tuple[type, ...]) -> type:
    names = ", ".join(part.__name__ for part in parts)
    return type(f"{policy.__name__}[{names}]", (*parts, policy), {"__module__": policy.__module__})
