"""Choice of a data set's episodes: the key `episodes` of every data plugin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import field, frozen

from vla_rl.core.errors import UserError

RANGE = re.compile(r"(\d{1,15})-(\d{1,15})", re.ASCII)
LISTED = 20
"""Most numbers and ranges in a message."""


def check_numbers(instance: Any, attribute: Any, numbers: Any) -> None:
    """Validate the value of a key with episodes. Raise ValueError for a count below 1, and for an item that is neither
    a number nor a range."""
    if isinstance(numbers, int):
        if numbers < 1:
            raise ValueError(f"{numbers} is below 1")
    elif isinstance(numbers, tuple):
        if not numbers:
            raise ValueError("is an empty list; give episodes, or leave the key out")
        for item in numbers:
            _parse_range(item)


@frozen(kw_only=True)
class Exclusion:
    """All episodes but some."""

    exclude: tuple[int | str, ...] = field(validator=check_numbers)
    """Episodes to leave out: their numbers, and ranges such as "10-19" (both ends are left out)."""


EpisodeChoice = int | tuple[int | str, ...] | Exclusion | None
"""Count of episodes from the first on; or their numbers and ranges (`[0, 2, "10-19"]`); or all but some; None: all."""


class EpisodeFilter:
    """Decides which episodes of a data set are read."""

    def __init__(self, choice: EpisodeChoice) -> None:
        self._choice = choice
        items = choice.exclude if isinstance(choice, Exclusion) else choice if isinstance(choice, tuple) else ()
        self._ranges = [_parse_range(item) for item in items]
        self.last = max(high for _, high in self._ranges) if isinstance(choice, tuple) else None
        """Highest number that is read; None: unknown."""

    def includes_episode(self, number: int, place: int) -> bool:
        """Return whether the episode with this number, at this place in order (from 0), is read."""
        if isinstance(self._choice, int):
            return place < self._choice
        named = any(low <= number <= high for low, high in self._ranges)
        return self._choice is None or named == isinstance(self._choice, tuple)

    def is_past(self, number: int, place: int) -> bool:
        """Return whether neither this episode nor a later one is read."""
        if isinstance(self._choice, int):
            return place >= self._choice
        return self.last is not None and number > self.last

    def select_episodes(self, source: str, numbers: Sequence[int]) -> list[int]:
        """Return those of a data set's episode numbers, in order, that are read. Raise UserError as `check_choice`
        does."""
        self.check_choice(source, numbers)
        return [number for place, number in enumerate(numbers) if self.includes_episode(number, place)]

    def check_choice(self, source: str, numbers: Sequence[int]) -> None:
        """Raise UserError for a number or range of the key that none of the data set's episodes has, and where no
        episode is left."""
        for low, high in self._ranges:
            if not any(low <= number <= high for number in numbers):
                named = f"episode {low}" if low == high else f"episodes {low} to {high}"
                raise UserError(f"{source} has no {named}, which `episodes` names; it has {format_numbers(numbers)}")
        if numbers and not any(self.includes_episode(number, place) for place, number in enumerate(numbers)):
            raise UserError(f"{source}: `episodes` excludes all {len(numbers)} episodes; leave some in")


def exclude_remedy(numbers: Iterable[int]) -> str:
    """Return the key that leaves out these episodes, as a spec has it."""
    return f"`episodes: {{exclude: [{format_numbers(numbers, quote=True)}]}}`"


def format_numbers(numbers: Iterable[int], quote: bool = False) -> str:
    """Return numbers with neighbours as ranges: `0, 2, 10-19`, at most `LISTED` of them. `quote`: ranges in quotes, as
    YAML needs them."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    mark = '"' if quote else ""
    texts = [str(low) if low == high else f"{mark}{low}-{high}{mark}" for low, high in ranges]
    more = ["..."] if len(texts) > LISTED else []
    return ", ".join([*texts[:LISTED], *more])


def _parse_range(item: int | str) -> tuple[int, int]:
    """Return the first and last number of an item. Raise ValueError for what is neither a number nor a range."""
    if isinstance(item, int) and item >= 0:
        return item, item
    match = RANGE.fullmatch(item) if isinstance(item, str) else None
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f'{item!r} is not an episode; give numbers from 0 on, and ranges such as "10-19"')
    return int(match[1]), int(match[2])
