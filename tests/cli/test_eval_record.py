"""The pages' lines that record an evaluation, as they are written, next to a run in `runs/quickstart`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import load_spec, make_component
from vla_rl.runtime.start import evaluate, run

ROOT = Path(__file__).parents[2]
SHORT = (
    *("train.steps=1", "train.lr_warmup_steps=0", "rollout.episodes=8", "env.num_envs=8", "runtime.backend=local"),
    *("eval.episodes_per_task=1", "eval.before=false", "placement={type: collocated}", "hooks=[]"),
)


def lines_of(page):
    """The page's commands that record an evaluation of the quickstart, or read what was recorded."""
    text = (ROOT / "docs" / "how-to" / page).read_text("utf-8")
    return re.findall(r"vla-rl ((?:eval runs/quickstart|data episodes)[^`#\n]*)", text)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """Folder with a run in `runs/quickstart`."""
    folder = tmp_path_factory.mktemp("clone")
    spec = load_spec(ROOT / "src" / "vla_rl" / "cli" / "examples" / "tabletop_grpo.yaml", SHORT)
    run(spec, folder / "runs" / "quickstart")
    return folder


@pytest.mark.parametrize(
    ("page", "commands"), [("record-episodes.md", ["eval"]), ("look-at-data.md", ["eval", "data"])]
)
def test_the_lines_of_the_page(quickstart, tmp_path, fork_server, page, commands):
    lines = lines_of(page)
    assert [line.split()[0] for line in lines] == commands
    (tmp_path / "runs").symlink_to(quickstart / "runs")
    path = os.pathsep.join(filter(None, sys.path))
    for line in lines:
        done = fork_server.run_python(
            "-m", "vla_rl.cli.main", *shlex.split(line), cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "episodes" / "meta" / "info.json").is_file()


def test_a_spec_records_into_any_folder_of_the_working_directory(quickstart, tmp_path, monkeypatch):
    """No run is evaluated, so no name in the working directory is a file of one."""
    monkeypatch.chdir(tmp_path)
    spec = load_spec(quickstart / "runs" / "quickstart" / "spec.yaml")
    evaluate(spec, record=make_component("hook", "lerobot", folder="episodes"))
    assert (tmp_path / "episodes" / "meta" / "info.json").is_file()


def test_files_of_the_evaluated_run_are_kept(quickstart, monkeypatch):
    monkeypatch.chdir(quickstart)
    folder = Path("runs/quickstart")
    hook = make_component("hook", "lerobot", folder=str(folder / "episodes"))
    with pytest.raises(UserError, match="episodes is a file of the run itself"):
        evaluate(load_spec(folder / "spec.yaml"), (folder / "checkpoints" / "last").resolve(), record=hook)
