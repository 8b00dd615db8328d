"""Statistics of actions against the simulator's bounds."""

from __future__ import annotations

import logging

import attrs
import pytest

from vla_rl.testing import synthetic
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError, check_action_range
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale

ENV = synthetic.env_info(action_dim=2, bounds=((-1.0, 1.0),))
"""Takes -1 to 1."""


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ((0.0, 1.0), "never reach the other half of that: set model.gripper: rlds if it is a gripper"),
        ((-1.0, 0.004), "never reach the other half"),
        ((0.0, 1.004), "never reach the other half"),
        ((-57.0, 57.0), "half of it or more is clipped"),
        ((-0.9, 0.9), None),
        ((-1.2, 1.1), None),
        ((0.1, 0.9), None),  # a height, which is never below the table
        ((0.0, 0.0), None),
        ((1.001, 1.001), None),  # a gripper that is never closed, rounded
    ],
)
def test_what_is_warned_of(last: tuple[float, float], said: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_action_range("statistics of x", [(-1.0, 1.0), last], ENV, gripper="model.gripper: rlds")
    if said is None:
        assert not caplog.records
        return
    assert said in caplog.text
    assert f"statistics of x: dimension 1 ranges from {last[0]:g} to {last[1]:g}, the simulator takes -1 to 1" in (
        caplog.text
    )


def test_another_robots_range_is_refused() -> None:
    with pytest.raises(MismatchError, match="dimension 0 ranges from 5 to 9, .* takes -1 to 1; .*; set this"):
        check_action_range("x", [(5.0, 9.0), (0.0, 1.0)], ENV, remedy="; set this")


def test_a_gripper_that_the_model_converts(caplog: pytest.LogCaptureFixture) -> None:
    """The gripper's statistics are the data set's; the simulator must accept both ends."""
    check_action_range("x", [(-1.0, 1.0), (0.0, 1.0)], ENV, gripper="g: y", converts=True)
    assert not caplog.records
    narrow = attrs.evolve(ENV, action_low=(-1.0, 0.0))
    check_action_range("x", [(-1.0, 1.0), (0.0, 1.0)], narrow, gripper="g: y", converts=True)
    assert "g: y makes the last number of an action -1 or 1, and the simulator takes 0 to 1" in caplog.text


def test_what_a_scale_says_of_its_range() -> None:
    ends = ((0.5, -1.0), (0.25, 2.0))
    assert FeatureScale(mode="MEAN_STD", values=ends, dim=2).usual_ranges() == [(0.25, 0.75), (-3.0, 1.0)]
    assert FeatureScale(mode="QUANTILES", values=ends, dim=2).usual_ranges() == [(0.5, 0.25), (-1.0, 2.0)]
    assert FeatureScale(mode="IDENTITY", values=(), dim=2).usual_ranges() == []
