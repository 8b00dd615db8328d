"""One spec, the same trajectories and the same loss trace wherever its roles run."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_runs import LOSS_APART, read_metrics, scripted_spec

from vla_rl.core.spec.spec import load_spec, parse_spec
from vla_rl.runtime.start import run

TABLETOP = Path(__file__).parents[3] / "examples" / "tabletop_grpo.yaml"
SLOTS = {"type": "slots"}
CASES = {
    "one worker": {"type": "collocated"},
    "two workers": {"type": "collocated", "workers": 2},
    "own processes": {**SLOTS, "sim": 2, "policy": 1, "learner": 2},
    "two lanes each": {**SLOTS, "sim": 2, "policy": 2, "stages": 2},
    "batching": {**SLOTS, "sim": 1, "stages": 4, "max_batch": 4, "max_wait_s": 0.01},
    "disaggregated": {"type": "disaggregated"},
    "hybrid": {"type": "hybrid"},
    "two stages": {"type": "hybrid", "pipeline_stages": 2},
    "four stages": {"type": "hybrid", "pipeline_stages": 4, "sim": "cpu", "policy": "0-1", "learner": "0"},
    "auto": {"type": "auto"},
}
STRATEGIES = {
    "one process": ["runtime.backend=local"],
    "disaggregated": ["placement={type: disaggregated}"],
    "hybrid": ["placement={type: hybrid, pipeline_stages: 2}"],
}
LIGHT = ("env/success_rate", "env/return", "rollout/env_steps", "rollout/kept", "update/samples")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Metrics of the scripted spec in one process."""
    folder = tmp_path_factory.mktemp("local") / "run"
    run(parse_spec(scripted_spec()), folder, False)
    return read_metrics(folder)


@pytest.mark.ray
@pytest.mark.parametrize("case", CASES)
def test_ray_equals_local(train, local, case):
    expected = local
    _, got = train("ray", runtime={"backend": "ray"}, placement=CASES[case])
    assert len(got) == len(expected) == 6
    for a, b in zip(expected, got, strict=True):
        assert a["step"] == b["step"]
        assert [a.get(k) for k in LIGHT] == [b.get(k) for k in LIGHT]
        assert a.get("loss/total") == pytest.approx(b.get("loss/total"), abs=LOSS_APART)
        assert a.get("eval/success_rate") == b.get("eval/success_rate")
    if case == "one worker":  # equal batch shapes: equal bits
        assert got == expected


@pytest.mark.ray
def test_ppo_bootstraps_across_processes(train):
    changes = {
        "algorithm": {"type": "ppo"},
        "rollout": {"episodes": None, "auto_reset": {"steps": 6}, "group_size": 1},
        "train": {"steps": 2},
    }
    _, expected = train("local", **changes)
    _, got = train("ray", runtime={"backend": "ray"}, placement={**SLOTS, "sim": 2}, **changes)
    for a, b in zip(expected, got, strict=True):
        assert a.get("loss/value") == pytest.approx(b.get("loss/value"), abs=LOSS_APART)
        assert a.get("value/explained_variance") == pytest.approx(b.get("value/explained_variance"), abs=1e-4)


@pytest.mark.ray
def test_warm_up_travels_to_the_learner(train):
    results, metrics = train(
        runtime={"backend": "ray"},
        placement={**SLOTS, "sim": 2, "learner": 2},
        bc_warmup={"episodes": 16, "epochs": 30, "lr": 3e-2},
        train={"steps": 0},
    )
    assert metrics[0]["bc_warmup/expert_success"] == 1.0
    assert results["success"]["rate"] >= 0.95


@pytest.mark.ray
def test_the_tabletop_under_each_strategy_by_the_placement_block_alone(tmp_path):
    shorter = [
        "env.num_envs=16",
        "rollout.episodes=16",
        "rollout.group_size=2",
        "train.steps=1",
        "eval.before=false",
        "eval.episodes_per_task=1",
    ]
    got = {}
    for name, change in STRATEGIES.items():
        run(load_spec(TABLETOP, [*shorter, *change]), tmp_path / name, False)
        got[name] = read_metrics(tmp_path / name)
    for lines in got.values():
        for a, b in zip(got["one process"], lines, strict=True):
            assert [a.get(k) for k in LIGHT] == [b.get(k) for k in LIGHT]
            assert a.get("loss/total") == pytest.approx(b.get("loss/total"), abs=LOSS_APART)
    assert any(line.get("update/samples", 0) > 0 for line in got["hybrid"])
