"""What is said once of a method that other processes call: its phase, its lane and its track in the trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar, cast

from attrs import frozen

F = TypeVar("F", bound=Callable[..., Any])
Door = Literal["call", "beside", "weights", "waiting", "practice", "lane"]
"""How a call gets in: one after another; or, while another call goes on, in a thread of its own kind: for what is asked
beside, where weights arrive, where calls wait for something, where the policy practises in a world model, and one for
each lane that works at the same time."""
Shows = Literal["own", "first", "last", "beside", "practice", "none"]
IMAGINED = "imagined"
"""Role: rows of a world model, as those of simulators are of the role "sim"."""
Phase = Literal["act", "learn"]
"""In `act` simulators and policies work, in `learn` learners."""


@frozen(kw_only=True)
class Remote:
    phase: Phase | None = None
    """Phase that the call needs; None: any."""
    lane: int | None = None
    """Which argument says the lane, or lanes, for the trace."""
    main: bool = False
    """Part of the role's phase of an iteration, between whose first and last calls idle time is a bubble."""
    track: Shows = "own"
    """On which track of the trace it shows: its own role's; for a worker's methods, that of the first or last role of
    its slot; or that of what goes on beside the learner, or of the practice in a world model."""
    door: Door = "call"


def remote(
    *,
    phase: Phase | None = None,
    lane: int | None = None,
    main: bool = False,
    track: Shows = "own",
    door: Door = "call",
) -> Callable[[F], F]:
    """Mark a method of a role, or of a worker, that other processes call."""

    def mark(method: F) -> F:
        cast(Any, method).remote = Remote(phase=phase, lane=lane, main=main, track=track, door=door)
        return method

    return mark


def declared(method: Callable[..., Any]) -> Remote:
    """Return what an interface declares of its method. Raises TypeError for one that is not declared with `@remote`."""
    declaration: object = getattr(method, "remote", None)
    if not isinstance(declaration, Remote):
        raise TypeError(f"{method.__qualname__} is not declared with @remote")
    return declaration


def declaration_of(role: object, method: str) -> Remote:
    """Return what the interface of a role declares of its method. Raises TypeError where no interface declares it."""
    return _declaration(type(role), method)  # type: ignore[arg-type] # a class is hashable


@cache
def _declaration(role: type, method: str) -> Remote:
    for base in role.__mro__:
        declaration: object = getattr(base.__dict__.get(method), "remote", None)
        if isinstance(declaration, Remote):
            return declaration
    raise TypeError(f"{role.__name__}.{method} is in no interface of remote methods")
