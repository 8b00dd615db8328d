"""The plugin on RoboTwin's real runtime, in a separate interpreter.

    VLA_RL_ROBOTWIN_PYTHON=/path/to/python pytest tests/plugins/envs/test_robotwin_runtime.py

names one (default: that of `make robotwin`, if it is there) with the packages of tools/robotwin_requirements.txt, the
runtime wheel and vla-rl. The robot of boxes is written by tools/robotwin_assets.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from robotwin_double.interview import FILE as ANSWERS

from vla_rl.core.catalogue import load
from vla_rl.core.contexts import DataContext
from vla_rl.plugins.envs.robotwin.config import STATE_DIM
from vla_rl.testing import synthetic

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("VLA_RL_ROBOTWIN_PYTHON") or ROOT / "build" / "robotwin" / "bin" / "python")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.is_file(), reason="VLA_RL_ROBOTWIN_PYTHON names no interpreter with RoboTwin"),
]
TASK, CHUNK, HEIGHT = "stack_blocks_two", 25, 48


def in_robotwin(*arguments: Any) -> str:
    """Run a script in RoboTwin's interpreter, with this checkout's code. Return what it prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [str(PYTHON), *map(str, arguments)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    in_robotwin("tools/robotwin_assets.py", folder)
    return folder


def test_it_answers_as_recorded(assets: Path, tmp_path: Path) -> None:
    """test_robotwin.py asks the double the same."""
    in_robotwin(ANSWERS.with_name("interview.py"), TASK, assets, tmp_path / "answers.json")
    assert json.loads((tmp_path / "answers.json").read_text()) == json.loads(ANSWERS.read_text())


def test_the_expert_is_recorded_as_a_data_set(assets: Path, tmp_path: Path) -> None:
    """The expert solves scenes through the plugin, in chunks; `vla-rl sft` reads what the tool writes."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"""
        name: recorded
        model: {{type: film_resnet}}
        env: {{type: robotwin, tasks: {TASK}, assets: {assets}, cameras: [head], num_envs: 1,
               render: raster, shadows: false, image_height: {HEIGHT}, seeds: {{check: false}}}}
        rollout: {{chunk: {CHUNK}, episodes: 1, group_size: 1, max_steps: 250}}
        algorithm: {{type: grpo}}
        train: {{steps: 0, lr: 1.0e-4, micro_batch: 1}}
        """
    )
    in_robotwin("tools/record_expert.py", spec, tmp_path / "set", "--episodes", 2, "--noise", 0.02)
    info = synthetic.env_info(state_dim=STATE_DIM, action_dim=STATE_DIM, bounds=((-4.0, 4.0),))
    info = evolve(info, cameras={"head": (HEIGHT, HEIGHT * 4 // 3)})
    plugin = load("data", "lerobot")
    data = plugin.build(plugin.config(folder=tmp_path / "set"), DataContext(env=info, chunk=CHUNK))
    assert 2 * 8 <= data.num_samples() <= 2 * 10
