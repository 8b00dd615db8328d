"""Names of actions and states: the same names in another order are refused."""

from __future__ import annotations

import pytest

from vla_rl.core.errors import CheckpointError, UserError
from vla_rl.toolkit.feature_names import check_order

LEFT_FIRST = ("left.pos", "right.pos", "gripper")


@pytest.mark.parametrize(
    "other",
    [(), LEFT_FIRST, ("Left.pos", "RIGHT.pos", "Gripper"), ("x", "y", "z"), ("left.pos", "right.pos", "hand")],
    ids=["unknown", "equal", "other letters", "other names", "one other name"],
)
def test_names_that_do_not_contradict_pass(other: tuple[str, ...]) -> None:
    check_order("action", "data", LEFT_FIRST, "robot", other)
    check_order("action", "data", other, "robot", LEFT_FIRST)


@pytest.mark.parametrize(
    "other", [("right.pos", "left.pos", "gripper"), ("gripper", "left.pos", "right.pos"), ("right.pos", "x", "y")]
)
def test_another_order_is_refused_with_both_lists(other: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        check_order("action", "data", LEFT_FIRST, "robot", other)
    first, *lists = str(error.value).splitlines()
    assert first == "data and robot have the numbers of the action in another order"
    assert lists[:2] == ["  data: left.pos, right.pos, gripper", f"  robot: {', '.join(other)}"]
    with pytest.raises(CheckpointError, match="state"):
        check_order("state", "data", LEFT_FIRST, "robot", other, CheckpointError)
