"""The key `episodes` of data plugins: counts, lists with ranges, exclusions."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import field, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import Problems, Structurer
from vla_rl.toolkit.data.episodes import (
    EpisodeChoice,
    EpisodeFilter,
    EpisodeLabels,
    EpisodeSelection,
    check_numbers,
    exclude_remedy,
)

NUMBERS = [1, 2, 3, 5, 6, 9]  # episodes 0, 4, 7 and 8 were deleted


@frozen(kw_only=True)
class Config:
    episodes: EpisodeChoice = field(default=None, validator=check_numbers)


def read(value: Any) -> EpisodeChoice:
    return Structurer().read_value({"episodes": value}, Config).episodes


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, NUMBERS),
        (2, [1, 2]),
        (100, NUMBERS),
        ([6, 2], [2, 6]),
        ([2, "5-7"], [2, 5, 6]),
        ({"exclude": [2]}, [1, 3, 5, 6, 9]),
        ({"exclude": ["1-3", 9]}, [5, 6]),
    ],
)
def test_what_is_chosen(value: Any, chosen: list[int]) -> None:
    assert EpisodeFilter(read(value)).select_episodes("set", NUMBERS) == chosen


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "0 is below 1"),
        ([], "is an empty list"),
        ([-1], "-1 is not an episode"),
        (["7-3"], "'7-3' is not an episode; give numbers from 0 on, and ranges"),
        (["all"], "'all' is not an episode"),
        ({"exclude": [], "first": 2}, "unknown key"),
        ({"exclude": []}, "is an empty list"),
        ({"tasks": []}, "tasks"),
        ({"success": None}, "give one, or leave out `episodes`"),
        ("0-3", "expected int or tuple or a mapping with keys of (exclude, tasks, success)"),
    ],
)
def test_values_that_mean_nothing_are_refused(value: Any, message: str) -> None:
    with pytest.raises(Problems) as error:
        read(value)
    assert message in str(error.value)


def test_episodes_that_are_not_there_are_refused() -> None:
    for value, message in (
        ([1, 4], "set has no episode 4, which `episodes` names; it has 1-3, 5-6, 9"),
        (["7-8"], "set has no episodes 7 to 8"),
        ({"exclude": [40]}, "set has no episode 40"),
        ({"exclude": ["0-9"]}, "set: `episodes` excludes all 6 episodes"),
    ):
        with pytest.raises(UserError, match=message):
            EpisodeFilter(read(value)).select_episodes("set", NUMBERS)


CONTENTS = [
    EpisodeLabels(number=number, instructions=frozenset([task]), success=success)
    for number, task, success in (
        (1, "Pick up the cup", True),
        (2, "open the drawer", True),
        (3, "pick up the bowl", False),
        (5, "open the drawer", False),
    )
]


@pytest.mark.parametrize(
    ("value", "positions", "left_out"),
    [
        (None, [0, 1, 2, 3], None),
        ([2, 3], [0, 1, 2, 3], None),
        ({"success": True}, [0, 1], "2 episodes are read; `episodes` leaves out 3, 5"),
        ({"success": False}, [2, 3], "leaves out 1-2"),
        ({"tasks": ["pick up *"]}, [0, 2], "leaves out 2, 5"),
        ({"tasks": ["open the drawer", "pick up the cup"]}, [0, 1, 3], "leaves out 3"),
        ({"tasks": ["pick up *"], "success": True, "exclude": [9]}, [0], "and those of `exclude: [9]`"),
    ],
)
def test_tasks_and_success_choose(
    value: Any, positions: list[int], left_out: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert EpisodeFilter(read(value)).select_labelled("set", CONTENTS) == positions
    assert (left_out in caplog.text) if left_out else not caplog.text


def test_conditions_that_no_episode_meets_are_refused() -> None:
    for value, message in (
        ({"tasks": ["open the draw"]}, r"set has no task 'open the draw'; did you mean 'open the drawer'(.|\n)*it has"),
        ({"tasks": ["open *"], "success": True, "exclude": [2]}, "none of 3 episodes meets the conditions"),
    ):
        chosen = EpisodeFilter(read(value))
        contents = [content for content in CONTENTS if chosen.includes_episode(content.number, 0)]
        with pytest.raises(UserError, match=message):
            chosen.select_labelled("set", contents)


def test_a_reader_in_order_knows_when_to_stop() -> None:
    assert [EpisodeFilter(2).is_past(n, n) for n in range(3)] == [False, False, True]
    assert [EpisodeFilter((1, "0-0")).is_past(n, n) for n in range(3)] == [False, False, True]
    assert not EpisodeFilter(EpisodeSelection(exclude=(0,))).is_past(99, 99)


def test_a_remedy_is_a_key_that_pastes() -> None:
    import yaml

    text = exclude_remedy([7, 3, 8, 9, 12])
    assert text == '`episodes: {exclude: [3, "7-9", 12]}`'
    assert read(yaml.safe_load(text.strip("`"))["episodes"]) == EpisodeSelection(exclude=(3, "7-9", 12))
    many = exclude_remedy(range(0, 80, 2))
    assert read(yaml.safe_load(many.strip("`"))["episodes"]) == EpisodeSelection(exclude=tuple(range(0, 80, 2)))
