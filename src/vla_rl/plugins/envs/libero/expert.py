"""Scripted expert for LIBERO: reach, descend, grasp, lift, carry, lower, open, retreat. It reads the simulator's object
poses, which a policy never sees, and returns actions as a policy would."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array

Vector = tuple[float, float, float]

METRES_PER_UNIT = 0.05
"""Displacement of the hand's set point for an action of 1, in metres (OSC_POSE)."""
GAIN = 2.0
"""How far ahead of the goal the set point is, as a factor: the hand follows with a delay."""
UP = np.array([0.0, 0.0, 1.0])
CLOSE_ENOUGH = 0.012
"""Distance in metres at which a goal counts as reached."""


@frozen(kw_only=True)
class ExpertRecipe:
    """Recipe for moving one object onto or into another; metres, in world axes."""

    thing: str
    target: str
    grasp: Vector
    """Offset from the object's origin to where the hand closes."""
    release: Vector
    """Offset from the target's origin to where the object's origin is released."""
    hover: float = 0.12
    """Height above the grasp point at which the hand arrives, in metres."""
    lift: float = 0.25


BOWL_TO_PLATE = ExpertRecipe(
    thing="akita_black_bowl_1",
    target="plate_1",
    grasp=(0.0, -0.055, 0.025),  # the rim: fingers open along y
    release=(0.0, 0.0, 0.03),
)
SOLVED = {
    "libero_spatial": (0, 1, 2, 3, 8, 9),
    "libero_object": (0, 2, 3, 4, 5, 6, 7, 8, 9),
}
"""Tasks on which the expert succeeds in at least four of five episodes."""


def find_recipe(suite: str, index: int, instruction: str) -> ExpertRecipe:
    """Return the recipe of a task. Raise UserError for a task without one; the message names those that have one."""
    if index not in SOLVED.get(suite, ()):
        solved = "; ".join(f"{name} {', '.join(map(str, tasks))}" for name, tasks in SOLVED.items())
        raise UserError(
            f"libero has no scripted expert for {suite} task {index} ({instruction!r}); it has for: {solved}"
        )
    if suite == "libero_spatial":
        return BOWL_TO_PLATE
    thing = instruction.removeprefix("pick up the ").removesuffix(" and place it in the basket").replace(" ", "_")
    return ExpertRecipe(thing=f"{thing}_1", target="basket_1", grasp=(0.0, 0.0, 0.0), release=(0.0, 0.0, 0.12))


class Phase(IntEnum):
    """Phase of the expert, in order."""

    REACH = 0
    DESCEND = 1
    GRASP = 2
    LIFT = 3
    CARRY = 4
    LOWER = 5
    OPEN = 6
    RETREAT = 7


class Expert:
    """Closed-loop expert: `choose_action` is called once per observation of an episode, whichever action is executed
    then. A missed grasp or a dropped object is tried again."""

    def __init__(self, recipe: ExpertRecipe) -> None:
        self._recipe = recipe
        self._begin_phase(Phase.REACH)
        self._grasped_at = np.zeros(3)
        self._held_by = np.zeros(3)

    def _begin_phase(self, phase: Phase) -> None:
        self.phase = phase
        self._steps = 0

    def choose_action(self, observation: Mapping[str, Array]) -> Array:
        """Return the action for an observation of the simulator, float64 [7] in [-1, 1]."""
        recipe, hand = self._recipe, observation["robot0_eef_pos"]
        thing = observation[f"{recipe.thing}_pos"]
        release = observation[f"{recipe.target}_pos"] + np.array(recipe.release)
        if Phase.LIFT <= self.phase <= Phase.LOWER and np.linalg.norm(hand - thing - self._held_by) > 0.06:
            self._begin_phase(Phase.REACH)
        self._steps += 1
        goal, arrived = self._find_goal(hand, thing, release)
        action = np.zeros(7)
        action[:3] = (goal - hand) / METRES_PER_UNIT * GAIN
        action[6] = 1.0 if Phase.GRASP <= self.phase <= Phase.LOWER else -1.0
        if arrived:
            self._begin_phase(Phase((self.phase + 1) % len(Phase)))
        return np.clip(action, -1.0, 1.0)

    def _find_goal(self, hand: Array, thing: Array, release: Array) -> tuple[Array, bool]:
        """Return the hand's goal in this phase, and whether the phase is over."""
        recipe = self._recipe
        grasp = thing + np.array(recipe.grasp)
        match self.phase:
            case Phase.REACH:
                goal = grasp + UP * recipe.hover
                return goal, bool(np.linalg.norm((goal - hand)[:2]) < CLOSE_ENOUGH and abs(goal[2] - hand[2]) < 0.03)
            case Phase.DESCEND:
                return grasp, bool(np.linalg.norm(grasp - hand) < CLOSE_ENOUGH) or self._steps > 40
            case Phase.GRASP:
                if self._steps == 1:
                    self._grasped_at = hand.copy()
                self._held_by = hand - thing
                return self._grasped_at, self._steps > 12
            case Phase.LIFT:
                goal = self._grasped_at + UP * recipe.lift
                return goal, bool(abs(goal[2] - hand[2]) < 0.03) or self._steps > 40
            case Phase.CARRY:  # the object, not the hand, moves over the target
                goal = release + hand - thing
                goal[2] = self._grasped_at[2] + recipe.lift
                return goal, bool(np.linalg.norm((goal - hand)[:2]) < CLOSE_ENOUGH) or self._steps > 90
            case Phase.LOWER:
                goal = release + hand - thing
                return goal, bool(hand[2] - goal[2] < 0.015) or self._steps > 50
            case Phase.OPEN:
                return hand, self._steps > 12
            case Phase.RETREAT:
                return hand + UP * 0.05, self._steps > 20
