"""LIBERO's success predicates as numbers. `goals` reads which of them a task needs, and `success` evaluates them."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

KINDS = ("on object", "on site", "in site", "<", ">", ">=")


@frozen(kw_only=True)
class GeomContacts:
    """Contact between two objects, as the geoms of each."""

    one: tuple[int, ...]
    other: tuple[int, ...]


@frozen(kw_only=True)
class Predicate:
    """A condition on the state of one world."""

    kind: Literal["on object", "on site", "in site", "<", ">", ">="]
    """An object is on another one: not below its origin, above its centre; it is on a region; its origin is in the box
    of a region; or joints are on one side of a threshold: of drawers, doors and knobs."""
    thing: int = 0
    """Body."""
    target: int = 0
    """Body or site."""
    size: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Half edges of a region."""
    contact: GeomContacts | None = None
    """Contact that is asked besides; None for one with the table."""
    joints: tuple[int, ...] = ()
    """Indices into the joint positions."""
    threshold: float = 0.0
    every: bool = True
    """All of the joints, else any of them."""
