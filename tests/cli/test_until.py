"""`vla-rl eval --until` ends when its question is answered."""

from __future__ import annotations

import numpy as np
import pytest

import vla_rl
from vla_rl import UserError
from vla_rl.cli.until import bound_mean, describe_answer, read_rule

SPEC = {
    "name": "policy",
    "model": {"type": "openvla_oft", "checkpoint": "builtin:tabletop"},
    "env": {"type": "tabletop", "num_envs": 32},
    "rollout": {"chunk": 4, "episodes": 32, "group_size": 8},
    "algorithm": {"type": "grpo"},
    "train": {"steps": 1, "lr": 1e-4, "micro_batch": 64},
    "eval": {"episodes_per_task": 40},
    "runtime": {"backend": "local"},
    "hooks": [],
}


def test_the_interval_holds_however_often_one_looks():
    rng = np.random.default_rng(0)
    left_out = 0
    for _ in range(60):
        values = (rng.random(120) < 0.7).astype(float)
        ends = [bound_mean(values[:count]) for count in range(5, 121, 23)]
        left_out += any(not low <= 0.7 <= high for low, high in ends)
    assert left_out <= 3  # 5 % of 60
    low, high = bound_mean((rng.random(2000) < 0.7).astype(float))
    assert 0.62 < low < 0.7 < high < 0.78
    assert bound_mean([]) == (0.0, 1.0) and bound_mean([1.0] * 200)[0] > 0.9


def test_an_evaluation_ends_when_it_knows(tmp_path):
    file = tmp_path / "first.json"
    result = vla_rl.evaluate(SPEC, until="above 0.95", output=file)
    until = result["until"]
    assert until["answer"] == "no" and until["high"] < 0.95 and until["states"] == 320
    assert until["n"] == len(result["episodes"]) == result["success"]["n"] < 320
    assert "above 0.95: no, after" in describe_answer(until)
    again = vla_rl.evaluate(SPEC, until=f"better than {file}")
    assert again["until"]["answer"] == "open" and again["until"]["n"] == until["n"]  # the same policy
    assert again["until"]["low"] < 0 < again["until"]["high"]


@pytest.mark.parametrize("text", ["above 90", "under 0.5", "better than nothing.json"])
def test_other_rules_are_refused(text):
    with pytest.raises(UserError, match=r"nothing\.json|--until"):
        read_rule(text)


def test_a_benchmark_is_evaluated_whole():
    with pytest.raises(UserError, match="suites are evaluated whole"):
        vla_rl.evaluate(SPEC, benchmark="tabletop", until="above 0.5")
