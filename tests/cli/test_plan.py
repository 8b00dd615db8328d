"""`vla-rl plan`: strategies compared without running any."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from vla_rl.cli.candidates import TRIED_STAGES
from vla_rl.cli.main import app
from vla_rl.cli.plan import cluster_of

SPEC = """
name: planned
plugins: [vla_rl.testing.scripted, vla_rl.testing.apart]
model: {type: linear}
env: {type: scripted, num_envs: 64}
rollout: {chunk: 8, episodes: 256, group_size: 8}
algorithm: {type: grpo}
placement: {type: slots, stages: 2}
train: {steps: 10, lr: 1.0e-3, micro_batch: 32}
"""
PROFILE = {
    "chunk_steps": 10,
    "sim": {"seconds": 0.8, "rows": 64},
    "policy": {"seconds": 0.8, "rows": 64},
    "learner": {"seconds": 80.0},
    "parameters": 7e9,
    "trainable": 1e8,
    "trajectory_bytes": 2**20,
}


@pytest.fixture
def plan(tmp_path):
    """Run the command; -> (exit status, output)."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))

    def run(*arguments, profile=True):
        given = ["--profile", str(tmp_path / "profile.json")] if profile else []
        result = CliRunner().invoke(app, ["plan", str(tmp_path / "spec.yaml"), *given, *arguments])
        return result.exit_code, result.output

    return run


def test_the_strategies_of_eight_devices(plan):
    status, output = plan("--devices", "8", "--json")
    assert status == 0
    own, *others = json.loads(output)
    found = {row["strategy"]: row for row in others}
    collocated = found["collocated"]
    assert (own["strategy"], own["spec"]) == ("slots", True)
    assert own["rollout_s"] == pytest.approx(4 * 10 * 0.8 + 0.4, rel=0.01), (
        "one pipeline of two lanes, which is filled once"
    )
    assert collocated["rollout_s"] == pytest.approx(4 * 10 * 0.2), "an eighth of the rows on each of eight devices"
    assert collocated["update_s"] == pytest.approx(10.0)
    assert collocated["idle"]["sim"] == pytest.approx(1 - 4.0 / collocated["iteration_s"])
    assert collocated["device_bytes"] == 14e9 + 1.2e9
    assert {f"hybrid, {k} stage{'s' * (k > 1)}" for k in TRIED_STAGES} < set(found)
    (best,) = (row for row in (own, *others) if row["best"])
    assert best["env_steps_per_s"] == max(row.get("env_steps_per_s", 0.0) for row in found.values())


def test_the_table_says_what_does_not_fit_and_what_was_assumed(plan):
    status, output = plan(
        "--devices", "1", "--cpus", "4", "env.num_envs=63", "rollout.episodes=63", "rollout.group_size=1"
    )
    assert status == 0
    assert "on 1 GPU, 4 CPUs" in output
    assert "slots does not fit: 63 rows" in output
    assert "best: " in output
    assert "is proportional to the rows" in output


def test_what_running_ahead_brings(plan):
    """A learner that takes longer than the rollout, on two lanes: one step of lag hides all of it."""
    status, output = plan("--devices", "3", "--json")
    own = json.loads(output)[0]
    assert status == 0
    assert own["bottleneck"] == "learner"
    found = own["overlap"]
    assert found["rollout_s"] == pytest.approx(4 * 10 * 0.8, rel=0.02)
    assert found["training_s"] == 80.0
    assert found["by_lag"]["0"]["step_s"] == own["iteration_s"]
    assert [found["by_lag"][lag]["step_s"] for lag in "123"] == pytest.approx([80.0] * 3)
    assert found["by_lag"]["0"]["share"] < 0.95 <= found["by_lag"]["1"]["share"]
    assert found["least_lag"] == 1
    assert [found["by_lag"][lag]["waiting_bytes"] for lag in "0123"] == [k * 256 * 2**20 for k in (1, 2, 3, 4)]
    assert found["periodic_s"] == pytest.approx(80.0 + found["rollout_s"] / 4)
    text = plan("--devices", "3")[1]
    assert "the least that reaches 0.95: max_lag 1" in text
    assert "; its bottleneck: " in text and "busy 54 % of the time" in text
    assert "periodic, 4 parts" in text and "1.0 GiB" in text


def test_running_ahead_needs_learners_apart(plan):
    status, output = plan("--devices", "2", "asynchrony.max_lag=1", "placement={type: collocated}", "--json")
    own, *others = json.loads(output)
    assert status == 0
    assert "max_lag 1 needs learners in workers of their own" in own["reason"]
    (best,) = (row for row in others if row["best"])
    assert best["strategy"] == "slots" and "overlap" in best


def test_it_says_that_latencies_are_missing(plan):
    status, output = plan(profile=False)
    assert status == 2
    assert "--profile RUN/trace.json" in output


def test_a_cluster_of_devices_comes_with_cpus_and_memory():
    cluster = cluster_of(8, None, 64)
    assert (cluster.gpus, cluster.cpus, cluster.memory) == (8, 128, 64 * 2**30)
    assert cluster_of(0, 3, None).cpus == 3
