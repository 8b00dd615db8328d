"""Declaration of remote methods: phase, lane, concurrency group, and track in the trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar, cast

from attrs import frozen

F = TypeVar("F", bound=Callable[..., Any])
ConcurrencyGroup = Literal["call", "concurrent", "weights", "waiting", "background", "lane"]
"""Concurrency group of a call. "call" runs one after another; other groups run in own threads beside it. "concurrent"
is for short requests, "weights" for loading weights, "waiting" for calls that wait for finished tickets, "background"
for roles that step parts add and rollouts in their envs, and "lane" has a thread a concurrent lane."""
Shows = Literal["own", "first", "last", "receiver", "background", "none"]
OWN_ROLES = ("worker", "sim", "policy", "rollout", "learner")
"""Roles that this runtime builds; parts of the training step add others."""
Phase = Literal["act", "learn"]
"""Phase of an iteration: in `act` simulators and policies work, in `learn` learners."""


@frozen(kw_only=True)
class Remote:
    """What `@remote` declares of a method."""

    phase: Phase | None = None
    """Phase that the call needs; None: any phase."""
    lane: int | None = None
    """Index of the argument that holds the lane, or lanes, for the trace."""
    main: bool = False
    """True for calls of the role's phase of an iteration. Idle time between its first and last one is a bubble."""
    track: Shows = "own"
    """Track of the trace on which the call shows: its own role's; for a worker's methods, that of the first or last
    role of its slot; or the track of what runs concurrently with the learner, or in the background."""
    group: ConcurrencyGroup = "call"


def remote(
    *,
    phase: Phase | None = None,
    lane: int | None = None,
    main: bool = False,
    track: Shows = "own",
    group: ConcurrencyGroup = "call",
) -> Callable[[F], F]:
    """Mark a method of a role, or of a worker, as one that other processes call."""

    def mark_method(method: F) -> F:
        cast(Any, method).remote = Remote(phase=phase, lane=lane, main=main, track=track, group=group)
        return method

    return mark_method


def read_declaration(method: Callable[..., Any]) -> Remote:
    """Return what an interface declares of its method. Raises TypeError for one that is not declared with `@remote`."""
    declaration: object = getattr(method, "remote", None)
    if not isinstance(declaration, Remote):
        raise TypeError(f"{method.__qualname__} is not declared with @remote")
    return declaration


def declaration_of(role: object, method: str) -> Remote:
    """Return what the interface of a role declares of its method. Raises TypeError where no interface declares it."""
    return _find_declaration(type(role), method)  # type: ignore[arg-type] # a class is hashable


@cache
def _find_declaration(role: type, method: str) -> Remote:
    for base in role.__mro__:
        declaration: object = getattr(base.__dict__.get(method), "remote", None)
        if isinstance(declaration, Remote):
            return declaration
    raise TypeError(f"{role.__name__}.{method} is in no interface of remote methods")
