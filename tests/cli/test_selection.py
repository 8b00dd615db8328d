"""A checkpoint that was chosen by evaluations on the same states is called the best of many."""

from __future__ import annotations

import json

from vla_rl.cli.evaluate import describe_choice, describe_selection


def test_the_best_of_many_has_a_wider_interval(tmp_path):
    lines = [
        {
            "step": step,
            "eval/success_rate": rate,
            "eval/success_low": 0.0,
            "eval/success_high": 1.0,
            "eval/episodes": 40,
        }
        for step, rate in {0: 0.1, 1: 0.6, 2: 0.9, 3: 0.7}.items()
    ]
    (tmp_path / "spec.yaml").write_text("name: run\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint = tmp_path / "checkpoints" / "step_000002"
    success = {"rate": 0.9, "low": 0.77, "high": 0.96, "n": 40}
    selection = describe_selection(checkpoint, {"step": 2, "success": success})
    assert selection["evaluations"] == 4
    assert selection["corrected"]["low"] < 0.77 < 0.96 < selection["corrected"]["high"]
    assert "the best of 4 evaluations" in describe_choice(selection)
    assert describe_selection(checkpoint, {"step": 1, "success": success}) is None  # not the best
    assert describe_selection(checkpoint, {"step": 3, "success": success}) is None  # the last, which no one chose
    assert describe_selection(checkpoint, {"step": 2, "success": {**success, "n": 80}}) is None  # on other states
    assert describe_selection(tmp_path / "a" / "b" / "c", {"step": 2, "success": success}) is None  # of no run
    assert describe_selection(None, {"step": 2, "success": success}) is None
