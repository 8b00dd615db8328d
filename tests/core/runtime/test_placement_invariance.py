"""One spec, the same trajectories and the same loss trace wherever its roles run."""

from __future__ import annotations

import pytest

SLOTS = {"type": "slots"}
CASES = {
    "one worker": {"type": "collocated"},
    "two workers": {"type": "collocated", "workers": 2},
    "own processes": {**SLOTS, "sim": 2, "policy": 1, "learner": 2},
    "two lanes each": {**SLOTS, "sim": 2, "policy": 2, "stages": 2},
    "window": {**SLOTS, "sim": 1, "stages": 4, "max_batch": 4, "max_wait": 0.01},
}
LIGHT = ("env/success_rate", "env/return", "rollout/env_steps", "rollout/kept", "update/samples")


@pytest.mark.ray
@pytest.mark.parametrize("case", CASES)
def test_ray_equals_local(train, case):
    _, expected = train("local")
    _, got = train("ray", runtime={"backend": "ray"}, placement=CASES[case])
    assert len(got) == len(expected) == 6
    for a, b in zip(expected, got, strict=True):
        assert a["step"] == b["step"]
        assert [a.get(k) for k in LIGHT] == [b.get(k) for k in LIGHT]
        assert a.get("loss/total") == pytest.approx(b.get("loss/total"), abs=1e-5)
        assert a.get("eval/success_rate") == b.get("eval/success_rate")
    if case == "one worker":  # equal batch shapes: equal bits
        assert got == expected


@pytest.mark.ray
def test_ppo_bootstraps_across_processes(train):
    changes = {
        "algorithm": {"type": "ppo"},
        "rollout": {"episodes": None, "steps": 6, "auto_reset": "immediate", "group_size": 1},
        "train": {"steps": 2},
    }
    _, expected = train("local", **changes)
    _, got = train("ray", runtime={"backend": "ray"}, placement={**SLOTS, "sim": 2}, **changes)
    for a, b in zip(expected, got, strict=True):
        assert a.get("loss/value") == pytest.approx(b.get("loss/value"), abs=1e-5)
        assert a.get("value/explained_variance") == pytest.approx(b.get("value/explained_variance"), abs=1e-4)


@pytest.mark.ray
def test_warm_up_travels_to_the_learner(train):
    results, metrics = train(
        runtime={"backend": "ray"},
        placement={**SLOTS, "sim": 2, "learner": 2},
        warmup={"episodes": 16, "epochs": 30, "lr": 3e-2},
        train={"steps": 0},
    )
    assert metrics[0]["warmup/expert_success"] == 1.0
    assert results["success"]["rate"] >= 0.95
