"""The warning about a run whose policy stands still."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from attrs import evolve

from vla_rl.core.run.weight_changes import STEPS, WEIGHTS_CHANGED, WeightChangeMonitor
from vla_rl.core.spec.spec import parse_spec

SPEC = {
    "name": "still",
    "model": {"type": "openvla_oft", "preset": "fast", "dtype": "bfloat16"},
    "env": {"type": "tabletop", "num_envs": 8},
    "rollout": {"chunk": 4, "episodes": 8, "group_size": 4},
    "algorithm": {"type": "grpo"},
    "train": {"steps": 1, "lr": 1e-9, "micro_batch": 8},
}


def warnings(shares: list[float], caplog: Any, factor: float = 1.0, dtype: str = "bfloat16") -> list[str]:
    spec = parse_spec(SPEC)
    spec = evolve(spec, model=evolve(spec.model, config=evolve(spec.model.config, dtype=dtype)))
    watch = WeightChangeMonitor(spec)
    with caplog.at_level(logging.WARNING):
        for share in shares:
            watch.note_metrics({WEIGHTS_CHANGED: share}, factor)
            watch.note_metrics({}, factor)  # a step in which nothing was trained
    return [record.message for record in caplog.records]


def test_a_run_that_stands_still_is_warned_once_with_advice(caplog: Any) -> None:
    (text,) = warnings([0.001, 0.002] * 20, caplog)
    assert text == (
        "warning: the policy hardly moves: each of 10 training steps changed at most 0.20% of its trained weights as "
        "it acts with them (bfloat16; update/weights_changed); raise the learning rate, or set model.dtype: float32, "
        "in which smaller steps show"
    )


def test_float32_is_not_advised_where_it_is_set(caplog: Any) -> None:
    (text,) = warnings([0.0] * STEPS, caplog, dtype="float32")
    assert text.endswith("raise the learning rate")


@pytest.mark.parametrize(
    ("shares", "factor"),
    [
        ([0.0] * (STEPS - 1), 1.0),
        ([0.0] * 5 + [0.02] + [0.0] * 50, 1.0),  # it moved: later it may have learned all that it can
        ([0.0] * 50, 0.1),  # a warm-up of the learning rate
    ],
)
def test_other_runs_are_not_warned(shares: list[float], factor: float, caplog: Any) -> None:
    assert warnings(shares, caplog, factor) == []
