"""Practice in a world model while rollouts run ahead of training, and with simulators in several workers."""

from __future__ import annotations

import json
import random
import signal
import time
from typing import Any

import pytest
import torch
from imagination_runs import EDM, ORACLE, practise, small
from scripted_runs import read_metrics, weights_in

from vla_rl.core.spec.spec import parse_spec

pytestmark = [pytest.mark.ray, pytest.mark.slow]
WORLDS = pytest.mark.parametrize(("world", "lag"), [(ORACLE, 2), (EDM, 1)], ids=["oracle", "edm"])
APART: dict[str, Any] = {"runtime": {"backend": "ray"}, "placement": {"type": "disaggregated"}}
SHOWN = ("loss/", "policy/", "world_model/", "imagination/", "env/", "advantages/")


def learnt(metrics) -> dict[int, dict[str, float]]:
    """What comes of each step, whatever was played meanwhile."""
    steps = {line["step"]: line for line in metrics if "world_model/updates" in line}
    return {n: {k: v for k, v in line.items() if k.startswith(SHOWN)} for n, line in steps.items()}


def assert_alike(found, expected) -> None:
    """To rounding: how many rows are inferred at once is a matter of time."""
    assert found.keys() == expected.keys()
    for step in found:
        assert found[step] == pytest.approx(expected[step], rel=1e-4, abs=1e-6), step


def assert_same_weights(folder, other) -> None:
    one, two = weights_in(folder), weights_in(other)
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-6), name


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Lag and world model -> (folder, results, metrics) of the synchronous run with old weights."""
    found = {}
    for world, lag in ((ORACLE, 2), (EDM, 1)):
        folder = tmp_path_factory.mktemp("simulated")
        found[lag] = (folder, *practise(folder, world_model=world, rollout={"lag": lag}))
    return found


def practice_of(results) -> dict[str, Any]:
    return {name: value for name, value in results["imagination"].items() if name != "fit_seconds"}


@WORLDS
def test_pinned_it_is_the_run_that_is_simulated(simulated, tmp_path, world, lag) -> None:
    """A fit sees the episodes of its step and no later ones, and the newest weights practise."""
    folder, results, expected = simulated[lag]
    asynchrony = {"max_lag": {"pinned": lag}}
    again, found = practise(tmp_path, world_model=world, asynchrony=asynchrony, **APART)
    assert_alike(learnt(found), learnt(expected))
    assert_same_weights(tmp_path, folder)
    assert practice_of(again) == practice_of(results)


def test_every_chunk_has_its_versions_and_none_is_too_old(tmp_path) -> None:
    """Where each inference uses the newest weights."""
    lag = 2
    results, metrics = practise(tmp_path, world_model=EDM, asynchrony={"max_lag": lag}, **APART)
    steps = {line["step"]: line for line in metrics if "world_model/updates" in line}
    assert [steps[n]["policy/lag_max"] for n in (1, 2, 3, 4)] == [min(n - 1, lag) for n in (1, 2, 3, 4)]
    for step in (2, 3, 4):
        assert steps[step]["imagination/policy_version"] == step - 1, "the newest"
        assert steps[step]["imagination/world_model_version"] == steps[step]["world_model/updates"]
        assert steps[step]["imagination/episodes"] == 32 and steps[step]["rollout/episodes"] == 16
    assert results["tickets"]["trained"] == 64 and results["imagination"]["tickets"]["trained"] == 96
    assert real_steps_in(tmp_path, "fit") > 0, "the simulators continue while the world model is fitted"


def real_steps_in(folder, name) -> int:
    """Chunk steps of simulators that began while a call of this name, in practice, was running."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    of_track = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    calls = [(of_track[e["pid"], e["tid"]], e) for e in events if e["ph"] == "X"]
    spans = [(e["ts"], e["ts"] + e["dur"]) for track, e in calls if track == "background" and e["name"] == name]
    assert spans
    begun = [e["ts"] for track, e in calls if track == "sim" and e["name"] == "step"]
    return sum(start < at < end for start, end in spans for at in begun)


def test_killed_and_resumed_it_equals_a_whole_run(simulated, tmp_path, start_run) -> None:
    """The tickets that were played ahead are played again."""
    folder, results, expected = simulated[1]
    changes = {"world_model": EDM, "asynchrony": {"max_lag": {"pinned": 1}}, **APART}
    parse_spec(small(**changes)).dump(tmp_path / "spec.yaml")
    killed, lines = tmp_path / "killed", tmp_path / "killed" / "metrics.jsonl"
    process = start_run(tmp_path / "spec.yaml", killed)
    while process.poll() is None and not (lines.exists() and len(lines.read_text().splitlines()) > 2):
        time.sleep(0.005)
    time.sleep(random.Random(time.time_ns()).random() * 0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    again, _ = practise(killed, True, **changes)
    assert_alike(learnt(read_metrics(killed)), learnt(expected))
    assert_same_weights(killed, folder)
    assert practice_of(again) == practice_of(results)


def test_several_workers_with_simulators_give_the_same_numbers(tmp_path) -> None:
    """The world model is in the first, and is fitted to the episodes of all."""
    _, expected = practise(tmp_path / "one")
    again, found = practise(
        tmp_path / "two", runtime={"backend": "ray"}, placement={"type": "collocated", "workers": 2}
    )
    assert_alike(learnt(found), learnt(expected))
    assert_same_weights(tmp_path / "two", tmp_path / "one")
    assert again["imagination"]["imagined_episodes"] == 96
