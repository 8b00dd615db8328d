"""Goals of LIBERO's tasks: which predicates they ask, read from a task's file and from robosuite's objects. Predicates
are numbers, which `success` evaluates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.libero.suites import LiberoTask

Side = Literal["<", ">", ">="]

KNOWN = ("on", "in", "open", "close", "turnon", "turnoff")
"""Predicates that exist for batches."""
NUDGE = 1e-6
"""Distance from a threshold at which a condition is compared with LIBERO's own."""


def check_goal(task: LiberoTask) -> None:
    """Raise UserError for a task whose goal asks a predicate that does not exist for batches. Reads its file alone."""
    text = re.sub(r";.*", "", Path(task.bddl_file).read_text(encoding="utf-8").lower())
    _, _, goal = text.partition("(:goal")
    for name in re.findall(r"\(\s*([^\s()]+)", goal):
        if name != "and":
            _refuse_unknown(name, task.name)


def read_goal(env: Any, task: str) -> tuple[Predicate, ...]:
    """Return the goal of a robosuite environment of LIBERO. Raise UserError for a condition that batches lack."""
    return tuple(read_predicate(env, state, task) for state in env.parsed_problem["goal_state"])


def read_predicate(env: Any, state: list[str], task: str) -> Predicate:
    """Return a predicate from LIBERO's words, such as ["on", "akita_black_bowl_1", "plate_1"]."""
    name, *objects = state
    _refuse_unknown(name, task)
    states = [env.object_states_dict[each] for each in objects]
    if name in ("on", "in"):
        thing, target = states
        return _read_placement(env, name, thing, target, task)
    return _read_joints(env, name, states[0], task)


def _refuse_unknown(name: str, task: str) -> None:
    if name.lower() not in KNOWN:
        raise UserError(
            f"libero_warp: the goal of {task!r} asks {name!r}, which is not written for batches; written are: "
            f"{', '.join(KNOWN)}. The simulator libero plays this task"
        )


def _read_placement(env: Any, name: str, thing: Any, target: Any, task: str) -> Predicate:
    body = env.obj_body_id[thing.object_name]
    if target.object_state_type == "site":
        site = env.sim.model.site_name2id(target.object_name)
        region = env.object_sites_dict[target.object_name]
        length, width, height = (float(number) for number in region.size)
        size = (length, width, height)
        if name == "in":
            return Predicate(kind="in site", thing=body, target=site, size=size)
        parent = env.get_object(target.parent_name)
        contact = None if parent is None else _read_contact(env, parent, env.get_object(thing.object_name))
        return Predicate(kind="on site", thing=body, target=site, size=size, contact=contact)
    if name == "in":
        raise UserError(
            f"libero_warp: the goal of {task!r} asks for an object in the object {target.object_name!r}, which is "
            "written for regions alone. The simulator libero plays this task"
        )
    contact = _read_contact(env, env.get_object(target.object_name), env.get_object(thing.object_name))
    return Predicate(kind="on object", thing=body, target=env.obj_body_id[target.object_name], contact=contact)


def _read_contact(env: Any, one: Any, other: Any) -> GeomContacts:
    model = env.sim.model
    numbers = [tuple(model.geom_name2id(name) for name in each.contact_geoms) for each in (one, other)]
    return GeomContacts(one=numbers[0], other=numbers[1])


def _read_joints(env: Any, name: str, state: Any, task: str) -> Predicate:
    site = state.object_state_type == "site"
    owner = env.get_object(state.parent_name if site else state.object_name)
    joints = (env.object_sites_dict[state.object_name] if site else owner).joints
    indices = tuple(int(env.sim.model.get_joint_qpos_addr(joint)) for joint in joints)
    ranges = owner.object_properties["articulation"]
    side, threshold = _find_threshold(name, ranges)
    official = {"open": "is_open", "close": "is_close", "turnon": "turn_on", "turnoff": "turn_off"}[name]
    if not _agrees(getattr(owner, official), side, threshold, owner.object_properties):
        raise UserError(
            f"libero_warp: the goal of {task!r} asks {name!r} of {owner.name!r}, whose condition is not one of those "
            "that are written for batches. The simulator libero plays this task"
        )
    return Predicate(kind=side, joints=indices, threshold=threshold, every=name in ("close", "turnoff"))


def _find_threshold(name: str, ranges: Mapping[str, list[float]]) -> tuple[Side, float]:
    """Return side and threshold of a condition, as LIBERO chooses them: some things open towards lower positions."""
    if name == "turnon":
        return ">=", float(min(ranges["default_turnon_ranges"]))
    if name == "turnoff":
        return "<", float(max(ranges["default_turnoff_ranges"]))
    open_range, close_range = ranges["default_open_ranges"], ranges["default_close_ranges"]
    opens_downwards = max(open_range) < min(close_range)
    if name == "open":
        return ("<", float(max(open_range))) if opens_downwards else (">", float(min(open_range)))
    return (">", float(min(close_range))) if opens_downwards else ("<", float(max(close_range)))


def _agrees(official: Callable[[float], bool], side: Side, threshold: float, properties: dict[str, Any]) -> bool:
    """Return whether LIBERO's own condition has this threshold. Some conditions note what is drawn, which is undone."""
    drawn = dict(properties["vis_site_names"])
    near = {threshold - NUDGE: side == "<", threshold: side == ">=", threshold + NUDGE: side != "<"}
    agrees = all(bool(official(position)) == expected for position, expected in near.items())
    properties["vis_site_names"].update(drawn)
    return agrees


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
