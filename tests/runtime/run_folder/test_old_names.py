"""Run folders of the version before the keys, metrics and results were renamed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scripted_runs import read_metrics, scripted_spec

from vla_rl.cli.report.gather import gather
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.run_folder.changes import changes_of
from vla_rl.runtime.run_folder.old_names import SPEC_KEYS, current_metric, current_spec, current_trace, renamed
from vla_rl.runtime.run_folder.spec_file import load_run_spec
from vla_rl.runtime.start import run

EARLIER = Path(__file__).parent / "earlier_version"
"""A run that the earlier version stopped after 2 of its steps."""
CHANGES = {
    "env": {"num_envs": 4},
    "rollout": {"episodes": 8, "group_size": 4},
    "train": {"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 1, "global_batch": None},
    "eval": {"before": True, "every": 0, "episodes_per_task": 2},
    "bc_warmup": {"episodes": 4, "epochs": 1, "lr": 1e-3},
}


@pytest.fixture
def earlier(tmp_path):
    return Path(shutil.copytree(EARLIER, tmp_path / "earlier"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "last" / "model" / "model.safetensors")


def test_a_run_of_the_earlier_version_resumes_as_if_it_had_never_stopped(earlier, tmp_path):
    spec = parse_spec(scripted_spec(**CHANGES))
    results = run(spec, earlier, resume=True)
    run(spec, tmp_path / "never stopped", resume=False)
    assert results["steps"] == 4 and results["success_before"]["n"] == 4 and results["mode"] == "training"
    assert results["tickets"]["trained"] + results["tickets"]["filtered"] + results["tickets"]["discarded"] == 32
    lines = read_metrics(earlier)
    assert max(line["step"] for line in lines) == 4 and "faults/envs" in next(
        line for line in lines if line["step"] == 3
    )
    for name, value in weights(tmp_path / "never stopped").items():
        # The first two steps ran on another processor, whose sums may differ in the last bits.
        torch.testing.assert_close(weights(earlier)[name], value, rtol=1e-3, atol=1e-4)


def test_no_change_is_reported_between_its_spec_and_the_same_one_today(earlier):
    spec = parse_spec(scripted_spec(**{**CHANGES, "train": {**CHANGES["train"], "steps": 2}}))
    assert not changes_of(earlier / "spec.yaml", spec, "training")
    assert load_run_spec(earlier).to_dict() == spec.to_dict()


def test_its_results_and_metrics_are_read_under_todays_names(earlier):
    written = json.loads((earlier / "results.json").read_text())
    data = gather(earlier)
    assert data.results["success_before"] == written["before"]
    assert data.results["repeats_std"] == written["deviation"] and data.results["mode"] == written["doing"]
    assert data.section("bc_warmup")["episodes"] == 4 and "warmup" not in data.spec
    assert all("faults/envs" in step and "faults/rows" not in step for step in data.steps)


def test_every_renamed_key_is_one_of_this_version_and_keeps_its_value():
    sections = {
        "warmup": {"episodes": 4, "epochs": 1, "lr": 1e-3},
        "asynchrony": {"max_lag": 1, "swap": "request", "stream": True, "replay": {"uses": 2, "max_age": 3}},
        "placement": {"type": "disaggregated", "lanes": "envs", "window": {"max_batch": 8, "max_wait": 0.3}},
        "env": {"rows_apart": True, "processes": {"rows_per_process": 2}},
        "imagination": {"fit_shut": 3, "measured": 16, "gates": True, "max_inflation": 0.2},
    }
    assert current_spec(sections) == {
        "bc_warmup": sections["warmup"],
        "asynchrony": {
            "max_lag": 1,
            "weights": "latest",
            "streaming_update": True,
            "replay": {"uses": 2, "max_lag": 3},
        },
        "placement": {
            "type": "disaggregated",
            "lanes": "envs",
            "batching": {"max_batch": 8, "max_wait_s": 0.3},
            "weight_transfer": "auto",
        },
        "env": {"independent_envs": True, "processes": {"envs_per_process": 2}},
        "imagination": {
            "fit_updates_below_threshold": 3,
            "evaluated_episodes": 16,
            "quality_thresholds": True,
            "max_over_estimation": 0.2,
        },
        "trainer": {"type": "policy_gradient"},
    }
    assert all(old != new for old, new in SPEC_KEYS.items())


def test_renaming_keeps_order_and_leaves_what_is_missing_or_taken():
    assert list(renamed({"a": 1, "old": 2, "b": 3}, {"old": "new"}).items()) == [("a", 1), ("new", 2), ("b", 3)]
    assert renamed({"old": 1, "new": 2}, {"old": "new"}) == {"old": 1, "new": 2}
    assert renamed({"section": 3}, {"section.old": "section.new", "none.old": "none.new"}) == {"section": 3}
    assert current_metric("warmup/loss") == "bc_warmup/loss" and current_metric("loss/policy") == "loss/policy"


def test_a_trace_of_the_earlier_version_has_the_names_of_this_one():
    event = {"ph": "X", "pid": 1, "tid": 3, "ts": 0.0, "dur": 5.0}
    track = {"ph": "M", "pid": 1, "tid": 6, "name": "thread_name"}
    earlier = {
        "displayTimeUnit": "ms",
        "otherData": {"assignments": [{"worker": 0, "rows": {"0": 4}}], "dropped_events": 0},
        "traceEvents": [
            {**track, "args": {"name": "practice"}},
            {**event, "cat": "work", "name": "feed"},
            {**event, "cat": "beside", "name": "draw"},
            {**event, "cat": "wait", "name": "feed"},
        ],
    }
    assert current_trace(earlier) == {
        "displayTimeUnit": "ms",
        "otherData": {"assignments": [{"worker": 0, "lanes": {"0": 4}}], "dropped_events": 0},
        "traceEvents": [
            {**track, "args": {"name": "imagination"}},
            {**event, "cat": "work", "name": "forward_backward"},
            {**event, "cat": "concurrent", "name": "draw_starts"},
            {**event, "cat": "wait", "name": "feed"},
        ],
    }
    assert current_trace(current_trace(earlier)) == current_trace(earlier)


def test_runs_from_before_trainers_have_those_that_did_the_same():
    spec = current_spec({"imitation": {"steps": 1}})
    assert spec["trainer"] == {"type": "policy_gradient"}
    assert spec["imitation"]["trainer"] == {"type": "behaviour_cloning"}
    assert current_spec({"imitation": None})["imitation"] is None
