"""A listener ends a run early, and well: as after its last step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted_runs import read_metrics, scripted_spec
from typer.testing import CliRunner

from vla_rl.cli.main import app
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.run_folder.folder import RunFolder
from vla_rl.runtime.start import run

PLUGINS = [
    "vla_rl.testing.scripted",
    "vla_rl.testing.slot_placement",
    str(Path(__file__).with_name("stopping_listener.py")),
]
AHEAD = {
    "runtime": {"backend": "ray"},
    "asynchrony": {"max_lag": 2},
    "placement": {"type": "disaggregated", "share_devices": True},
}


def spec_with(hooks, **changes):
    given = {"train": {"steps": 5}, "eval": {"every": 2, "episodes_per_task": 4}} | changes
    return parse_spec(scripted_spec(plugins=PLUGINS, hooks=[*hooks, {"type": "jsonl"}], **given))


@pytest.mark.parametrize(
    ("event", "at", "steps", "changes"),
    [
        ("on_run_start", 0, 0, {}),
        ("on_rollout_end", 3, 3, {}),
        ("on_update_end", 3, 3, {}),
        ("on_eval_end", 2, 2, {}),
        pytest.param("on_update_end", 3, 3, AHEAD, marks=pytest.mark.ray),
    ],
)
def test_a_run_that_a_listener_ends_is_evaluated_and_saved_and_can_be_continued(tmp_path, event, at, steps, changes):
    hooks = [{"type": "stop", "event": event, "at": at}]
    results = run(spec_with(hooks, **changes), tmp_path, False)
    assert results["steps"] == steps and results["stop_reason"] == f"good enough at step {at}"
    assert results["success"]["n"] == 8
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert bool(RunFolder(tmp_path).latest_checkpoint()) == bool(steps)
    evaluated = [line["step"] for line in read_metrics(tmp_path) if "eval/success_rate" in line]
    assert evaluated[-1] == steps
    if steps:
        continued = run(spec_with([], **changes), tmp_path, True)
        assert continued["steps"] == 5 and continued["stop_reason"] is None
        assert {line["step"] for line in read_metrics(tmp_path)} >= set(range(1, 6))


def test_the_command_ends_well_and_says_why(tmp_path):
    spec_with([{"type": "stop"}, {"type": "console", "mode": "plain"}]).dump(tmp_path / "spec.yaml")
    done = CliRunner().invoke(app, ["run", str(tmp_path / "spec.yaml"), "--folder", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "after step 2 of 5: good enough at step 2" in " ".join(done.output.split())
