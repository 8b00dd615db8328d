"""Choice of a data set's episodes and of their last steps: the keys `episodes` and `ends` of every data plugin."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.errors import UserError, did_you_mean

RANGE = re.compile(r"(\d{1,15})-(\d{1,15})", re.ASCII)
LISTED = 20
"""Most numbers and ranges, or tasks, in a message."""
Ends = Literal["drop", "repeat", "mask"]
"""Handling of the steps that no whole chunk follows."""
logger = logging.getLogger(__name__)


def check_numbers(instance: Any, attribute: Any, numbers: Any) -> None:
    """Validate a key with episodes. Raise ValueError for a count below 1 and an item that is no number or range."""
    if isinstance(numbers, int):
        if numbers < 1:
            raise ValueError(f"{numbers} is below 1")
    elif isinstance(numbers, tuple):
        if not numbers:
            raise ValueError("is an empty list; give episodes, or leave the key out")
        for item in numbers:
            _parse_range(item)


@frozen(kw_only=True)
class EpisodeSelection:
    """Conditions that every episode to read meets."""

    exclude: tuple[int | str, ...] | None = field(default=None, validator=check_numbers)
    """Episodes to leave out: their numbers, and ranges such as "10-19" (both ends are left out)."""
    tasks: tuple[str, ...] | None = field(default=None, validator=v.optional(v.min_len(1)))
    """Instructions to read, or patterns of them such as "pick up *"; an episode needs one of them."""
    success: bool | None = field(default=None)
    """true: only episodes that succeeded; false: only those that did not; null: both."""

    @success.validator
    def _check_conditions(self, attribute: Any, value: bool | None) -> None:
        if self.exclude is None and self.tasks is None and value is None:
            raise ValueError("is null, as all conditions are; give one, or leave out `episodes`")


EpisodeChoice = int | tuple[int | str, ...] | EpisodeSelection | None
"""Count of episodes from the first on; or their numbers and ranges (`[0, 2, "10-19"]`); or conditions; None: all."""


@frozen(kw_only=True)
class EpisodeLabels:
    """What an episode is chosen by, besides its number."""

    number: int
    instructions: frozenset[str]
    success: bool | None = None
    """None: not read, since `EpisodeFilter.needs_success` is False."""


class EpisodeFilter:
    """Decides which episodes of a data set are read."""

    def __init__(self, choice: EpisodeChoice) -> None:
        self._choice = choice
        self._selection = choice if isinstance(choice, EpisodeSelection) else None
        items = self._selection.exclude or () if self._selection else choice if isinstance(choice, tuple) else ()
        self._ranges = [_parse_range(item) for item in items]
        self.last = max(high for _, high in self._ranges) if isinstance(choice, tuple) else None
        """Highest number that is read; None: unknown."""
        self.needs_success = self._selection is not None and self._selection.success is not None
        """Whether `select_labelled` has to know which episodes succeeded."""

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
        """Return those of a data set's episode numbers that are read. Raise UserError as `check_choice` does."""
        self.check_choice(source, numbers)
        return [number for place, number in enumerate(numbers) if self.includes_episode(number, place)]

    def check_choice(self, source: str, numbers: Sequence[int]) -> None:
        """Raise UserError for a number or range of the key that no episode has, and where no episode is left."""
        for low, high in self._ranges:
            if not any(low <= number <= high for number in numbers):
                named = f"episode {low}" if low == high else f"episodes {low} to {high}"
                raise UserError(f"{source} has no {named}, which `episodes` names; it has {format_numbers(numbers)}")
        if numbers and not any(self.includes_episode(number, place) for place, number in enumerate(numbers)):
            raise UserError(f"{source}: `episodes` excludes all {len(numbers)} episodes; leave some in")

    def select_labelled(self, source: str, contents: Sequence[EpisodeLabels]) -> list[int]:
        """Return the positions in `contents`, which includes the episodes chosen by number, of those that are read. Log
        what the conditions leave out. Raise UserError for a task that no episode has, and where no episode is left."""
        if self._selection is None:
            return list(range(len(contents)))
        patterns, success = self._selection.tasks, self._selection.success
        known = sorted({text for content in contents for text in content.instructions})
        for pattern in patterns or ():
            if not _matches_any(known, [pattern]):
                listed = "; ".join(known[:LISTED]) + ("; ..." if len(known) > LISTED else "")
                raise UserError(
                    f"{source} has no task {pattern!r}{did_you_mean(pattern, known)}, which `episodes.tasks` names\n"
                    f"  it has: {listed}"
                )
        chosen = [
            position
            for position, content in enumerate(contents)
            if (patterns is None or _matches_any(content.instructions, patterns)) and success in (None, content.success)
        ]
        if contents and not chosen:
            raise UserError(f"{source}: none of {len(contents)} episodes meets the conditions of `episodes`")
        read = {contents[position].number for position in chosen}
        left_out = [content.number for content in contents if content.number not in read]
        excluded = f", and those of `exclude: {list(self._selection.exclude)}`" if self._selection.exclude else ""
        if left_out or excluded:
            logger.warning(
                "%s: %d episodes are read; `episodes` leaves out %s%s",
                *(source, len(chosen), format_numbers(left_out) if left_out else "no others", excluded),
            )
        return chosen


def _matches_any(instructions: Iterable[str], patterns: Iterable[str]) -> bool:
    """Return whether one of the instructions matches one of the patterns, upper and lower case alike."""
    return any(fnmatchcase(text.lower(), pattern.lower()) for text in instructions for pattern in patterns)


def exclude_remedy(numbers: Iterable[int]) -> str:
    """Return the key that leaves out these episodes, as a spec has it."""
    return f"`episodes: {{exclude: [{', '.join(_number_ranges(numbers, mark=chr(34)))}]}}`"


def format_numbers(numbers: Iterable[int]) -> str:
    """Return numbers with neighbours as ranges: `0, 2, 10-19`, at most `LISTED` of them."""
    texts = _number_ranges(numbers)
    more = ["..."] if len(texts) > LISTED else []
    return ", ".join([*texts[:LISTED], *more])


def _number_ranges(numbers: Iterable[int], mark: str = "") -> list[str]:
    """Return numbers with neighbours as ranges, which `mark` surrounds."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return [str(low) if low == high else f"{mark}{low}-{high}{mark}" for low, high in ranges]


def _parse_range(item: int | str) -> tuple[int, int]:
    """Return the first and last number of an item. Raise ValueError for what is neither a number nor a range."""
    if isinstance(item, int) and item >= 0:
        return item, item
    match = RANGE.fullmatch(item) if isinstance(item, str) else None
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f'{item!r} is not an episode; give numbers from 0 on, and ranges such as "10-19"')
    return int(match[1]), int(match[2])
