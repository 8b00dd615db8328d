"""Comparison of the order of actions and states by the names of their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from vla_rl.core.errors import UserError


def check_order(
    part: str,
    one: str,
    names: Sequence[str],
    other: str,
    other_names: Sequence[str],
    error: type[UserError] = UserError,
) -> None:
    """Raise `error`, with both lists, where a name that both have is at different positions: a policy would move other
    joints than it was trained to. Empty lists, and names that one of them lacks, are not compared.

    Args:
        part: "action" or "state".
        one, other: owners of the names, for the message.
    """
    positions, other_positions = (
        {name.casefold(): position for position, name in enumerate(given)} for given in (names, other_names)
    )
    if all(position == other_positions.get(name, position) for name, position in positions.items()):
        return
    raise error(
        f"{one} and {other} have the numbers of the {part} in another order\n"
        f"  {one}: {', '.join(names)}\n"
        f"  {other}: {', '.join(other_names)}\n"
        f"  reorder them in one of the two; where a name is wrong, correct it"
    )
