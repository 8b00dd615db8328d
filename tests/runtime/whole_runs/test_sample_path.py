"""Test that a sample passes through the files that the page on the architecture names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from vla_rl.core.run import loop
from vla_rl.core.spec.spec import load_spec
from vla_rl.runtime.start import run

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "vla_rl"
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
SHORT = [
    "runtime.backend=local",
    "train.steps=2",
    "env.num_envs=8",
    "rollout.auto_reset.steps=8",
    "eval={before: false, episodes_per_task: 1}",
    "hooks=[]",
]


@pytest.fixture
def executed(tmp_path, monkeypatch) -> set[str]:
    """Files of the package that the second step of a short PPO run executes, up to the optimiser step."""
    files: set[str] = set()

    def note(frame, event, argument):
        if event == "call":
            files.add(frame.f_code.co_filename)

    collect_rollout = loop.collect_rollout
    finish_step = loop.finish_step

    def collect_noted(runtime, flow, step):
        if step == 2:
            sys.setprofile(note)
        return collect_rollout(runtime, flow, step)

    def finish_unnoted(runtime, step, trained):
        sys.setprofile(None)
        return finish_step(runtime, step, trained)

    monkeypatch.setattr(loop, "collect_rollout", collect_noted)
    monkeypatch.setattr(loop, "finish_step", finish_unnoted)
    try:
        run(load_spec(ROOT / "examples" / "tabletop_ppo.yaml", SHORT), tmp_path / "run")
    finally:
        sys.setprofile(None)
    inside = (Path(file) for file in files if file.startswith(str(PACKAGE)))
    return {file.relative_to(PACKAGE).as_posix() for file in inside}


def test_a_sample_passes_through_the_files_on_the_page(executed):
    section = PAGE.read_text("utf-8").partition("## How a sample travels")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", section))
    assert len(named) > 20 and {"core/run/loop.py", "toolkit/trainers/trained_model.py"} <= named
    assert not [file for file in named if not (PACKAGE / file).is_file()]
    assert named <= executed
