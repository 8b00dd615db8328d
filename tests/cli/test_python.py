"""What the command line does, from Python, on one small run."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest

import vla_rl

SPEC: dict[str, Any] = {
    "name": "from-python",
    "seed": 3,
    "plugins": ["vla_rl.testing.scripted"],
    "model": {"type": "linear"},
    "env": {"type": "tabletop", "num_envs": 8, "image_size": 16},
    "rollout": {"chunk": 4, "episodes": 8, "group_size": 4, "max_steps": 12},
    "algorithm": {"type": "grpo", "filter_identical": False},
    "runtime": {"backend": "local"},
    "train": {"steps": 3, "lr": 1e-1, "micro_batch": 32},
    "eval": {"every": 2, "episodes_per_task": 2},
    "hooks": [{"type": "jsonl"}],
}


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> vla_rl.RunRecord:
    return vla_rl.run(SPEC, tmp_path_factory.mktemp("python") / "run")


def test_a_run_gives_results_and_metrics_as_arrays(record):
    assert record.metrics["step"].tolist() == [1, 2, 3]
    loss = record.metrics["loss/policy"]
    assert loss.dtype == np.float64 and loss.shape == (3,) and np.isfinite(loss).all()
    assert record.evaluations["step"].tolist() == [0, 2, 3] and record.evaluations["n"].tolist() == [16] * 3
    assert record.results["success"]["rate"] == record.evaluations["rate"][-1]
    assert record.spec == vla_rl.check(SPEC) and record.checkpoint.name == "step_000003"
    assert repr(record).startswith("RunRecord(") and "of 16 episodes" in repr(record)
    assert vla_rl.open_run(record.folder).metrics["loss/policy"].tolist() == loss.tolist()


def test_a_run_continues(record, tmp_path):
    first = vla_rl.run(SPEC, tmp_path / "run", overrides=["train.steps=2", "train.lr_schedule=constant"])
    assert first.metrics["step"].tolist() == [1, 2]
    second = vla_rl.run(first.folder, resume=True, overrides=["train.steps=3"])
    assert second.folder == first.folder and second.metrics["step"].tolist() == [1, 2, 3]
    assert first.reload().metrics["step"].tolist() == [1, 2, 3]


def test_a_run_is_drawn(record):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install -e '.[notebook]'")
    figure = record.plot(["env/success_rate", "loss/policy", "policy/entropy"])
    assert [panel.get_title("left") for panel in figure.axes] == ["env/success_rate", "loss/policy", "policy/entropy"]
    drawn = figure.axes[1].lines[0].get_ydata()
    assert list(drawn) == record.metrics["loss/policy"].tolist()
    with pytest.raises(vla_rl.UserError, match=r"has no metric 'loss/polici'; did you mean"):
        record.plot(["loss/polici"])


def test_a_policy_acts_and_is_served(record, tmp_path):
    pytest.importorskip("websockets", reason="pip install -e '.[serve]'")
    told: list[tuple[str, int, int]] = []
    here = vla_rl.evaluate(record.folder, progress=lambda *now: told.append(now))
    assert here["success"] == record.results["success"] and told[0] == ("eval", 0, 16)
    sessions, played = tmp_path / "sessions", tmp_path / "played"
    with vla_rl.serve(record.policy(), port=0, record=sessions) as served:
        there = vla_rl.evaluate(SPEC, policy=served.url, record=played)
    assert there["episodes"] == here["episodes"]
    recorded = [json.loads((folder / "meta" / "info.json").read_text()) for folder in (sessions, played)]
    assert recorded[0]["total_episodes"] > 0 and recorded[1]["total_episodes"] == 16
    assert served.server.answered > 0
    with pytest.raises(vla_rl.UserError, match="there is no 'openpie'; did you mean"):
        vla_rl.serve(record.folder, dialect="openpie")


def test_two_evaluations_are_compared(record, tmp_path):
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file, weights in zip(files, (record.checkpoint, None), strict=True):
        file.write_text(json.dumps(vla_rl.evaluate(SPEC, weights)))
    pairs = vla_rl.compare(*files)
    assert pairs["all"].n == 16 and 0 <= pairs["all"].p <= 1


def test_pages_plans_and_exports(record, tmp_path):
    assert "<html" in vla_rl.report(record.folder, tmp_path / "page.html").read_text()
    assert (vla_rl.export(record.folder, tmp_path / "given", format="own") / "README.md").is_file()
    with pytest.raises(vla_rl.UserError, match="--format: there is no 'lerobto'; did you mean 'lerobot'"):
        vla_rl.export(record.folder, tmp_path / "other", format="lerobto")
    (best,) = [entry for entry in vla_rl.plan(record.folder, overrides=["runtime.backend=ray"]) if entry["best"]]
    assert best["env_steps_per_s"] > 0


def test_plugins_simulators_and_projects(tmp_path):
    assert {"kind": "env", "name": "tabletop"}.items() <= next(
        row for row in vla_rl.list_plugins() if row["name"] == "tabletop"
    ).items()
    found = vla_rl.check_env("tabletop", overrides=["image_size=16"], seconds=0.0)
    assert not any(section.findings for section in found.sections)
    made = vla_rl.new_plugin("env", "my_sim", tmp_path / "project")
    assert (made / "pyproject.toml").is_file()


def test_files_of_a_run_are_read_when_they_are_asked_for(record, tmp_path):
    """A trace may have some hundred megabytes, and the record is what every run ends with."""
    folder = shutil.copytree(record.folder, tmp_path / "run")
    (folder / "trace.json").write_text("{")
    opened = vla_rl.open_run(folder)
    assert opened.checkpoint.name == "step_000003" and opened.spec == record.spec
    with pytest.raises(vla_rl.UserError, match=r"trace\.json"):
        opened.metrics  # noqa: B018


def test_what_is_not_a_run_is_an_error(tmp_path):
    with pytest.raises(vla_rl.UserError, match="is not the folder of a run"):
        vla_rl.open_run(tmp_path)
