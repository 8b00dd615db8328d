"""Actions relative to the state at their chunk's first step, as in openpi, lerobot, GR00T N1.7. Cheap to import."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from attrs import field, frozen

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.types import ArrayOrTensor, EnvInfo

References: TypeAlias = tuple[int | None, ...]
"""Place of the state's number that each number of an action is relative to; None: absolute. Empty: all are."""
GRIPPER = "gripper"
"""Part of the names of numbers that stay absolute unless a spec names them."""


def _check_dimensions(instance: Any, attribute: Any, value: Any) -> None:
    """Validate `dimensions` (attrs validator)."""
    chosen = [] if value is None else list(value)
    if value is not None and not chosen:
        raise ValueError("is empty; name the numbers that are relative, or leave `actions` out for absolute actions")
    for item in chosen:
        if isinstance(item, int) and item < 0:
            raise ValueError(f"{item} is not a place in an action; count from 0")
        if chosen.count(item) > 1:
            raise ValueError(f"names {item!r} twice")


@frozen(kw_only=True)
class RelativeActions:
    """Actions as differences to the state at the first step of their chunk."""

    relative_to: Literal["state"]
    """What is subtracted: the state that the policy acts on, one for all actions of a chunk."""
    dimensions: tuple[int | str, ...] | Mapping[int | str, int | str] | None = field(
        default=None, validator=_check_dimensions
    )
    """Numbers of an action that are relative: places from 0 on, or names. A mapping also says to which number of the
    state each is (`{x: tcp_x}`). Otherwise it is the one of the same name if both have names, else the one at the same
    place. Null: all whose names have no `gripper` in them."""


def match_state(chosen: RelativeActions, env: EnvInfo, error: type[UserError] = UserError) -> References:
    """Return which number of the state each number of an action is relative to. Raise `error` for numbers that the
    actions or the state do not have, and where names are needed and not known."""
    if not env.state_dim:
        raise error("model.actions: relative_to: state needs a state, and this simulator has none; leave it out")
    references: list[int | None] = [None] * env.action_dim
    for item, place in choose_numbers(chosen, env, error).items():
        if references[place] is not None:
            raise error(f"model.actions.dimensions names number {place} of an action twice; remove one")
        if isinstance(chosen.dimensions, Mapping):
            named = chosen.dimensions[item]
            references[place] = _find_place(named, "the state", env.state_names, env.state_dim, error)
        elif env.action_names and env.state_names:
            references[place] = _find_name(place, env, error)
        elif place < env.state_dim:
            references[place] = place
        else:
            raise error(
                f"model.actions: number {place} of an action is relative to number {place} of the state, which has "
                f"{env.state_dim} numbers (an action has {env.action_dim}); leave it out of actions.dimensions, or say "
                f"which number of the state it belongs to: dimensions: {{{place}: ...}}"
            )
    return tuple(references) if any(place is not None for place in references) else ()


def choose_numbers(chosen: RelativeActions, env: EnvInfo, error: type[UserError] = UserError) -> dict[int | str, int]:
    """Return the places of an action's relative numbers by the spec's words. Raise `error` as `match_state` does."""
    wanted: Collection[int | str] | None = chosen.dimensions
    if wanted is None:
        if not env.action_names:
            raise error(
                "model.actions: relative_to: state leaves grippers absolute, which are known by their names, and "
                f"neither the simulator nor the data names the {env.action_dim} numbers of an action; give "
                "actions.dimensions, such as [0, 1, 2]"
            )
        wanted = [place for place, name in enumerate(env.action_names) if GRIPPER not in name.casefold()]
    return {item: _find_place(item, "an action", env.action_names, env.action_dim, error) for item in wanted}


def needs_names(chosen: RelativeActions) -> bool:
    """Return whether the names of an action's numbers decide which are relative."""
    return chosen.dimensions is None or any(isinstance(item, str) for item in chosen.dimensions)


def _find_place(
    item: int | str, what: str, names: Sequence[str], count: int, error: type[UserError] = UserError
) -> int:
    """Return the place of a number that the spec gives by its place or its name."""
    if isinstance(item, int):
        if item < count:
            return item
        raise error(f"model.actions.dimensions: {what} has no number {item}; it has {count}, counted from 0")
    known = [name.casefold() for name in names]
    if item.casefold() in known:
        return known.index(item.casefold())
    available = f"its names are: {', '.join(names)}" if names else "its names are not known, so give places from 0 on"
    raise error(f"model.actions.dimensions: {what} has no number {item!r}{did_you_mean(item, names)}; {available}")


def _find_name(place: int, env: EnvInfo, error: type[UserError]) -> int:
    """Return the place in the state of an action's number, by its name."""
    name, known = env.action_names[place], [name.casefold() for name in env.state_names]
    if name.casefold() in known:
        return known.index(name.casefold())
    raise error(
        f"model.actions: number {name!r} of an action is relative to the state, which has no number of that name"
        f"{did_you_mean(name, env.state_names)}\n"
        f"  the state has: {', '.join(env.state_names)}\n"
        f"  say which it is in actions.dimensions: {{{name}: ...}}, or leave {name!r} out of it"
    )


def check_references(references: References, env: EnvInfo, source: str, error: type[UserError] = UserError) -> None:
    """Raise `error` where a simulator has not the numbers that relative actions need.

    Args:
        source: who says that actions are relative, such as "FOLDER".
    """
    indices = [place for place in references if place is not None]
    if indices and (max(indices) >= env.state_dim or len(references) != env.action_dim):
        raise error(
            f"{source} gives {len(references)} numbers an action, relative to the first {max(indices) + 1} numbers of "
            f"the state; this simulator takes {env.action_dim} and its state has {env.state_dim}; choose a checkpoint "
            f"of this robot"
        )


def take_offsets(state: ArrayOrTensor, references: References) -> Any:
    """Return what actions are relative to, [..., A] of states [..., S]: 0 for absolute numbers, whatever the state has
    there. An action minus this is the relative one, and a relative action plus this the absolute one."""
    offsets = state[..., [0 if place is None else place for place in references]]
    for number, place in enumerate(references):
        if place is None:
            offsets[..., number] = 0
    return offsets
