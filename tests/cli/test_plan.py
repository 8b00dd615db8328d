"""`vla-rl plan`: strategies compared without running any."""

from __future__ import annotations

import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vla_rl.cli.candidates import TRIED_STAGES
from vla_rl.cli.inputs import cluster_of
from vla_rl.cli.main import app

SPEC = """
name: planned
plugins: [vla_rl.testing.scripted, vla_rl.testing.slot_placement]
model: {type: linear}
env: {type: scripted, num_envs: 64}
rollout: {chunk: 8, episodes: 256, group_size: 8}
algorithm: {type: grpo}
placement: {type: slots, stages: 2}
train: {steps: 10, lr: 1.0e-3, micro_batch: 32}
"""
PROFILE = {
    "chunk_steps": 10,
    "sim": {"seconds": 0.8, "num_envs": 64},
    "policy": {"seconds": 0.8, "num_envs": 64},
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
    assert collocated["rollout_s"] == pytest.approx(4 * 10 * 0.2), "an eighth of the envs on each of eight devices"
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
    assert "slots does not fit: 63 envs" in output
    assert "best: " in output
    assert "is proportional to the envs" in output


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
    assert "periodic, 4 parts" in text and "wait at most" in text


def test_running_ahead_needs_learners_apart(plan):
    status, output = plan("--devices", "2", "asynchrony.max_lag=1", "placement={type: collocated}", "--json")
    own, *others = json.loads(output)
    assert status == 0
    assert "max_lag 1 needs learners in separate workers" in own["reason"]
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


def test_no_number_is_cut_on_eighty_columns(plan, monkeypatch):
    monkeypatch.setattr("vla_rl.cli.plan._make_console", lambda: Console(width=80, highlight=False))
    text = plan("--devices", "8")[1]
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    (collocated,) = [row for row in json.loads(plan("--devices", "8", "--json")[1]) if row["strategy"] == "collocated"]
    numbers = rows["collocated"].split()[1:]
    assert len(numbers) == 9 and {"disaggregated", "hybrid, 2 stages"} < rows.keys()
    assert float(numbers[0].replace(",", "")) == pytest.approx(collocated["env_steps_per_s"], rel=5e-3)
    assert float(numbers[1].replace(",", "")) == pytest.approx(collocated["iteration_s"], rel=5e-3)


def test_shards_are_counted_in_the_memory(plan):
    rows = json.loads(plan("--devices", "8", "train.sharding=full", "--json")[1])
    found = {row["strategy"]: row["device_bytes"] for row in rows if row.get("device_bytes")}
    assert found["collocated"] == 14e9 + (14e9 + 1.2e9) / 8, "gathered weights to act with, and an eighth of everything"
    assert found["disaggregated"] == 14e9, "that of a policy; each learner holds only a share"


def test_planning_says_how_far_it_is(plan, monkeypatch):
    monkeypatch.setattr("vla_rl.toolkit.waiting.PATIENCE_S", 0.0)
    monkeypatch.setattr("vla_rl.runtime.comm.status_line.PATIENCE_S", 0.0)
    monkeypatch.setattr("vla_rl.runtime.comm.status_line.EVERY_S", 0.0)
    output = plan("--devices", "4")[1]
    assert re.search(r"planning: 1 of \d+ strategies, 0:0\d", output)
    assert "planning: 0 of" in output and "forecasting what running ahead brings: 1 of 4" in output


GPU_SPEC = """
name: gpus
model: {type: openvla_oft, preset: tiny}
env: {type: tabletop, num_envs: 48}
rollout: {chunk: 4, episodes: 48, group_size: 8}
algorithm: {type: grpo}
placement: {type: collocated}
train: {steps: 1, lr: 1.0e-4, micro_batch: 64}
"""


def test_the_memory_of_gpus_is_predicted_for_every_placement(tmp_path):
    (tmp_path / "spec.yaml").write_text(GPU_SPEC)
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    arguments = ["plan", str(tmp_path / "spec.yaml"), "--profile", str(tmp_path / "profile.json"), "--devices", "3"]
    own, *others = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    apart = next(row for row in others if row["strategy"] == "disaggregated")
    assert len(own["gpus"]) == 3 and own["gpus"][0]["bytes"] == own["device_bytes"]
    (worker,) = own["gpus"][0]["workers"]
    assert worker["phase"] == "learner step" and sum(worker["parts"].values()) == own["device_bytes"]
    assert {"trained weights", "gradients", "optimiser state", "activations of 64 samples"} <= set(worker["parts"])
    assert [gpu["workers"][0]["roles"] for gpu in apart["gpus"]] == [["learner"], ["policy"]]
    text = CliRunner().invoke(app, arguments).output
    assert "fullest GPU with collocated: " in text and "activations of 64 samples" in text
    result = CliRunner().invoke(app, [*arguments, "--gpu-memory", "0.55"])
    assert "does not fit: a GPU needs 0.6 GiB in its learner step" in " ".join(result.output.split())


def test_without_a_rate_of_simulation_forecasts_are_bounds_and_none_is_the_best(tmp_path):
    """RoboTwin has no rate, tabletop has one."""
    robotwin = "{type: robotwin, tasks: stack_blocks_two, num_envs: 48}"
    (tmp_path / "spec.yaml").write_text(GPU_SPEC)
    arguments = ["plan", str(tmp_path / "spec.yaml"), "--gpu", "h100", "--devices", "2"]
    known = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert sum(row["best"] for row in known) == 1 and not any(row["bounds"] for row in known)
    bounded = json.loads(CliRunner().invoke(app, [*arguments, f"env={robotwin}", "--json"]).stdout)
    assert not any(row["best"] or "overlap" in row for row in bounded) and all(row["bounds"] for row in bounded)
    result = CliRunner().invoke(app, [*arguments, f"env={robotwin}"])
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "env steps/s step s rollout s" in text and "at most at least at least" in text
    assert "best: " not in text and "max_lag" not in text
    assert "no best is named, as nothing is known of how long robotwin simulates" in text
    assert "fullest GPU with collocated: " in text
