"""Runs by each strategy of `placement.weight_transfer` that a CPU has: equal to the last bit, also after a kill."""

from __future__ import annotations

from pathlib import Path

import dying_model
import pytest
import torch
from scripted_runs import weights_in

from vla_rl.runtime.driver import startup

pytestmark = [pytest.mark.ray]
PLUGINS = ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(Path(dying_model.__file__))]


def test_every_strategy_gives_equal_bits(train, tmp_path, monkeypatch):
    """Rollouts run ahead with pinned weights, so versions are published while policies act with older ones."""

    def run(folder, strategy):
        changes = {"train": {"steps": 3, "checkpoint_every": 3}, "eval": {"before": False}}
        placement = {"type": "disaggregated", "weight_transfer": strategy}
        ahead = {"max_lag": {"pinned": 1}}
        _, metrics = train(folder, runtime={"backend": "ray"}, placement=placement, asynchrony=ahead, **changes)
        # How far rollouts happen to be when a step ends: those of the next step are under way.
        timing = ("rollout/env_steps", "rollout/ready_tickets", "rollout/running_tickets")
        kept = [{key: value for key, value in line.items() if key not in timing} for line in metrics]
        played = sum(line.get("rollout/env_steps", 0) for line in metrics)
        return [*kept, {"played": played}], weights_in(tmp_path / folder)

    results = {strategy: run(strategy, strategy) for strategy in ("auto", "nccl")}
    monkeypatch.setattr(startup, "_on_one_machine", lambda locations: False)
    results["store"] = run("store", "host")
    expected, weights = results["auto"]
    assert len(expected) == 5
    assert any(line.get("policy/lag_mean", 0) > 0 for line in expected)
    for metrics, other in results.values():
        assert metrics == expected
        assert other.keys() == weights.keys()
        assert all(torch.equal(other[name], weights[name]) for name in weights)


@pytest.mark.parametrize(("strategy", "end"), [("nccl", "sender"), ("nccl", "receiver"), ("host", "sender")])
def test_a_run_continues_after_an_end_was_killed_in_a_transfer(train, tmp_path, caplog, strategy, end):
    changes = {
        "runtime": {"backend": "ray"},
        "placement": {"type": "slots", "weight_transfer": strategy},
        "train": {"steps": 3, "checkpoint_every": 1},
        "eval": {"before": False},
        "plugins": PLUGINS,
    }
    killed = tmp_path / "killed"
    _, metrics = train(model={"type": "dying", "end": end, "killed": str(killed)}, **changes)
    assert killed.exists()
    assert "continuing from the last checkpoint" in caplog.text
    assert "weight transfer" in caplog.text or f"worker {2 if end == 'sender' else 1} (" in caplog.text
    _, undisturbed = train("whole", model={"type": "dying", "end": end, "killed": str(killed)}, **changes)
    assert metrics == undisturbed
