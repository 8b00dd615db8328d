"""LIBERO's success predicates as masks over the worlds of a batch, in torch.

The formulas are those of `libero/envs/object_states/base_object_states.py` and `libero/envs/objects/site_object.py`.
`goals` reads which of them a task needs, with which numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from attrs import frozen
from torch import Tensor

CENTRED = 0.03
"""Largest horizontal distance of an object on another one, in metres."""
BELOW, ABOVE = 0.005, 0.10
"""How far below and above the top of a region an object on it may be, in metres."""
SUNK = 0.01
"""How far below a region an object inside it may be, in metres."""


class SceneView(NamedTuple):
    """What predicates read of N worlds."""

    bodies: Tensor
    """[N, bodies, 3]: positions [m]."""
    sites: Tensor
    """[N, sites, 3]: positions [m]."""
    site_rotations: Tensor
    """[N, sites, 3, 3]"""
    joints: Tensor
    """[N, nq]: joint positions."""
    pairs: Tensor
    """int64 [contacts, 2]: geoms that touch, of all worlds together."""
    worlds: Tensor
    """int64 [contacts]: world of each contact; a negative number marks an unused entry."""


class Predicate(ABC):
    """A condition on the state of one world. Fields are numbers, so that equal predicates compare equal."""

    @abstractmethod
    def evaluate(self, view: SceneView) -> Tensor:
        """Return in which worlds it holds, bool [N]."""


@frozen(kw_only=True)
class GeomContacts:
    """Contact between two objects, as the geoms of each."""

    one: tuple[int, ...]
    other: tuple[int, ...]

    def find_worlds(self, view: SceneView) -> Tensor:
        """Return in which worlds any geom of one touches any of the other, bool [N]."""
        one, other = view.pairs.new_tensor(self.one), view.pairs.new_tensor(self.other)
        of_one, of_other = torch.isin(view.pairs, one), torch.isin(view.pairs, other)
        touching = (of_one & of_other.flip(1)).any(1) & (view.worlds >= 0)
        counts = torch.zeros(len(view.bodies), dtype=torch.int32, device=view.bodies.device)
        return counts.index_add(0, view.worlds.clamp(min=0), touching.to(torch.int32)) > 0


@frozen(kw_only=True)
class OnObject(Predicate):
    """An object is on another one: not below its origin, above its centre, and touches it."""

    thing: int
    support: int
    """Bodies."""
    contact: GeomContacts

    def evaluate(self, view: SceneView) -> Tensor:
        thing, support = view.bodies[:, self.thing], view.bodies[:, self.support]
        centred: Tensor = (support - thing)[:, :2].norm(dim=1) < CENTRED
        return (support[:, 2] <= thing[:, 2]) & centred & self.contact.find_worlds(view)


@frozen(kw_only=True)
class OnSite(Predicate):
    """An object is on a region, and touches what the region belongs to."""

    thing: int
    """Body."""
    site: int
    size: tuple[float, float, float]
    contact: GeomContacts | None
    """None: a region of the table, whose contact is not asked."""

    def evaluate(self, view: SceneView) -> Tensor:
        way = view.bodies[:, self.thing] - view.sites[:, self.site]
        way = (view.site_rotations[:, self.site] @ way[:, :, None])[:, :, 0]
        length, width, top = self.size
        on = (top - BELOW < way[:, 2]) & (way[:, 2] < top + ABOVE)
        on &= (way[:, 0].abs() < length) & (way[:, 1].abs() < width)
        return on if self.contact is None else on & self.contact.find_worlds(view)


@frozen(kw_only=True)
class InSite(Predicate):
    """The origin of an object is in the box of a region."""

    thing: int
    """Body."""
    site: int
    size: tuple[float, float, float]

    def evaluate(self, view: SceneView) -> Tensor:
        half = (view.site_rotations[:, self.site] @ view.bodies.new_tensor(self.size)[:, None])[:, :, 0].abs()
        way = view.bodies[:, self.thing] - view.sites[:, self.site]
        low = -half - half.new_tensor([0.0, 0.0, SUNK])
        return ((way > low) & (way < half)).all(1)


@frozen(kw_only=True)
class JointThreshold(Predicate):
    """Joints are on one side of a threshold: drawers and doors that are open or closed, knobs that are turned."""

    joints: tuple[int, ...]
    """Indices into the joint positions."""
    side: Literal["<", ">", ">="]
    threshold: float
    every: bool
    """All of the joints, else any of them."""

    def evaluate(self, view: SceneView) -> Tensor:
        angles = view.joints[:, list(self.joints)]
        if self.side == "<":
            beyond = angles < self.threshold
        else:
            beyond = angles > self.threshold if self.side == ">" else angles >= self.threshold
        return beyond.all(1) if self.every else beyond.any(1)


def evaluate_goal(goal: tuple[Predicate, ...], view: SceneView) -> Tensor:
    """Return in which worlds all predicates of a goal hold, bool [N]."""
    held = torch.ones(len(view.bodies), dtype=torch.bool, device=view.bodies.device)
    for predicate in goal:
        held &= predicate.evaluate(view)
    return held
