"""Evaluates a task's goal in all worlds of a batch with Warp kernels. The formulas are those of
`libero/envs/object_states/base_object_states.py` and `libero/envs/objects/site_object.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import warp as wp

from vla_rl.plugins.envs.libero.warp.goals import KINDS, Predicate

CENTRED = 0.03
"""Largest horizontal distance of an object on another one, in metres."""
BELOW, ABOVE = 0.005, 0.10
"""How far below and above the top of a region an object on it may be, in metres."""
SUNK = 0.01
"""How far below a region an object inside it may be, in metres."""
ON_OBJECT, ON_SITE, IN_SITE, LESS, GREATER = range(5)
OF_ONE = 0x15555555
"""Every second bit: each contact has two bits of a geom's mask, one for each object."""


class GoalKernels:
    """A goal on the device that is current in Warp."""

    def __init__(self, goal: tuple[Predicate, ...], num_worlds: int, num_geoms: int) -> None:
        masks, numbers, joints = np.zeros(num_geoms, np.int32), [], list[int]()
        for place, predicate in enumerate(goal):
            bit = 0
            if predicate.contact is not None:
                bit = 1 << 2 * place
                masks[list(predicate.contact.one)] |= bit
                masks[list(predicate.contact.other)] |= 2 * bit
            ends = len(joints), len(joints) + len(predicate.joints)
            condition = KINDS.index(predicate.kind), predicate.thing, predicate.target
            numbers.append((*condition, bit, *ends, predicate.every))
            joints += predicate.joints
        self._masks = wp.array(masks, dtype=int)
        self._touching = wp.zeros(num_worlds, dtype=int)
        self._table = [
            wp.array(numbers, dtype=int),
            wp.array([predicate.size for predicate in goal], dtype=wp.vec3),
            wp.array([predicate.threshold for predicate in goal], dtype=float),
            wp.array([*joints, 0], dtype=int),
            self._touching,
        ]
        self.held = wp.zeros((num_worlds, len(goal)), dtype=bool)
        """Whether each predicate holds, as of the last evaluation."""

    def evaluate(self, scene: list[Any], pairs: Any, worlds: Any, num_contacts: Any) -> None:
        """Write `held`.

        Args:
            scene: positions of bodies [N, bodies] and sites [N, sites], rotations of sites, joint positions [N, nq].
            pairs: geoms that touch, vec2i [contacts], of all worlds together.
            worlds: world of each contact, int [contacts]; a negative number marks an unused entry.
            num_contacts: int [1]: how many entries of the contacts are in use.
        """
        self._touching.zero_()
        inputs = [num_contacts, pairs, worlds, self._masks]
        wp.launch(_find_contacts, dim=len(worlds), inputs=inputs, outputs=[self._touching])
        wp.launch(_evaluate_predicates, dim=self.held.shape, inputs=[*self._table, *scene], outputs=[self.held])


@wp.kernel(enable_backward=False)
def _find_contacts(
    num_contacts: wp.array[int],
    pairs: wp.array[wp.vec2i],
    worlds: wp.array[int],
    masks: wp.array[int],
    touching: wp.array[int],
) -> None:
    """Note which of the asked contacts there are in each world."""
    entry = wp.tid()
    if entry >= num_contacts[0] or worlds[entry] < 0:
        return
    first = masks[pairs[entry][0]]
    second = masks[pairs[entry][1]]
    contacts = ((first & (second >> 1)) | (second & (first >> 1))) & OF_ONE
    if contacts != 0:
        wp.atomic_or(touching, worlds[entry], contacts)


@wp.kernel(enable_backward=False)
def _evaluate_predicates(
    numbers: wp.array2d[int],
    sizes: wp.array[wp.vec3],
    thresholds: wp.array[float],
    joints_of: wp.array[int],
    touching: wp.array[int],
    bodies: wp.array2d[wp.vec3],
    sites: wp.array2d[wp.vec3],
    site_rotations: wp.array2d[wp.mat33],
    joints: wp.array2d[float],
    held: wp.array2d[bool],
) -> None:
    """Evaluate one predicate in one world."""
    world, place = wp.tid()
    kind = numbers[place, 0]
    target = numbers[place, 2]
    size = sizes[place]
    thing = bodies[world, numbers[place, 1]]
    holds = wp.bool(True)
    if kind == ON_OBJECT:
        away = bodies[world, target] - thing
        holds = away[2] <= 0.0 and wp.length(wp.vec2(away[0], away[1])) < CENTRED
    elif kind == ON_SITE:
        way = site_rotations[world, target] @ (thing - sites[world, target])
        holds = size[2] - BELOW < way[2] and way[2] < size[2] + ABOVE
        holds = holds and wp.abs(way[0]) < size[0] and wp.abs(way[1]) < size[1]
    elif kind == IN_SITE:
        half = wp.abs(site_rotations[world, target] @ size)
        way = thing - sites[world, target]
        holds = way[2] > -half[2] - SUNK and way[0] > -half[0] and way[1] > -half[1]
        holds = holds and way[0] < half[0] and way[1] < half[1] and way[2] < half[2]
    else:
        beyond = wp.int32(0)
        for i in range(numbers[place, 4], numbers[place, 5]):
            angle = joints[world, joints_of[i]]
            if angle > thresholds[place]:
                beyond += int(kind != LESS)
            elif angle < thresholds[place]:
                beyond += int(kind == LESS)
            else:
                beyond += int(kind > GREATER)
        holds = beyond > 0
        if numbers[place, 6] != 0:
            holds = beyond == numbers[place, 5] - numbers[place, 4]
    contact = numbers[place, 3]
    held[world, place] = holds and (touching[world] & contact) == contact
