"""A run's shape, worked out by hand."""

from __future__ import annotations

import pytest

from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import parse_spec

BASE = {
    "env": {"type": "tabletop", "num_envs": 8},
    "model": {"type": "film_resnet"},
    "algorithm": {"type": "gipo"},
    "rollout": {"chunk": 4, "episodes": 16, "group_size": 4},
    "train": {"steps": 5, "lr": 1e-3, "micro_batch": 8},
}


def shape_of(**changes):
    merged = {key: {**BASE.get(key, {}), **changes.get(key, {})} for key in (*BASE, *changes)}
    return RunShape.from_spec(parse_spec({"name": "shape", **merged}))


def test_episodes_count_before_envs():
    shape = shape_of(rollout={"episodes": 24})
    assert (shape.envs, shape.groups_per_step, shape.tickets_per_step) == (8, 6, 24)
    assert shape_of(rollout={"episodes": None, "auto_reset": {"steps": 16}}).groups_per_step == 2


@pytest.mark.parametrize(
    ("changes", "pinned", "overlaps"),
    [
        ({}, 0, False),
        ({"rollout": {"lag": 2}}, 2, False),
        ({"asynchrony": {"max_lag": 3}}, 0, True),
        ({"asynchrony": {"max_lag": {"pinned": 3}}}, 3, True),
    ],
)
def test_weights_are_pinned_by_either_key(changes, pinned, overlaps):
    shape = shape_of(**changes)
    assert (shape.pinned_lag, shape.has_overlap) == (pinned, overlaps)


def test_what_learners_hold_is_all_that_may_still_be_trained_on():
    """Steps 0 to 2 of 4 groups, and a buffer of two steps."""
    shape = shape_of(asynchrony={"max_lag": 2, "replay": {"uses": 3}})
    assert shape.has_replay and shape.replayed_groups == 8
    assert shape.groups_held == 3 * 4 + 8
    assert shape_of(asynchrony={"replay": {"uses": 3, "capacity": 9}}).replayed_groups == 9
