"""Our data sets and checkpoints in lerobot's own code, in an interpreter of its own.

    VLA_RL_LEROBOT_PYTHON=/path/to/python pytest tests/tools/test_in_lerobot.py

names one (Python 3.12) in which `pip install 'lerobot[dataset,pi,smolvla]'` was run.
"""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from PIL import Image

from vla_rl.core.catalogue import load
from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.randomness import Noise
from vla_rl.core.spec.spec import make_component, parse_spec
from vla_rl.core.types import to_numpy
from vla_rl.runtime.start import evaluate
from vla_rl.testing import synthetic
from vla_rl.toolkit.data.lerobot import LeRobotWriter
from vla_rl.toolkit.models.checkpoints.lerobot_layout import UNKNOWN, build_config
from vla_rl.toolkit.relative_actions import RelativeActions

PYTHON = os.environ.get("VLA_RL_LEROBOT_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="VLA_RL_LEROBOT_PYTHON names no interpreter with lerobot"),
]
SCRIPT = Path(__file__).parents[2] / "tools" / "in_lerobot.py"
CHUNK, ROWS = 4, 3
ENV = synthetic.env_info(bounds=((-1.0, 1.0),))
RELATIVE = {"actions": RelativeActions(relative_to="state", dimensions=(0, 2))}


def in_lerobot(*arguments: Any) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [PYTHON, SCRIPT, *arguments]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def record(folder: Path, rows: str) -> list[dict[str, Any]]:
    """Record eight episodes, and return their rows."""
    import pyarrow.parquet as pq

    spec = parse_spec(
        {
            "name": "recorded",
            "plugins": ["vla_rl.testing.scripted"],
            "model": {"type": "linear"},
            "env": {"type": "tabletop", "num_envs": 4, "image_size": 16},
            "rollout": {"chunk": CHUNK, "episodes": 4, "group_size": 4, "max_steps": 10},
            "algorithm": {"type": "grpo"},
            "runtime": {"backend": "local"},
            "train": {"steps": 0, "lr": 1e-3, "micro_batch": 4},
            "eval": {"episodes_per_task": 1},
        }
    )
    evaluate(spec, record=make_component("hook", "lerobot", folder=str(folder), rows=rows))
    files = sorted((folder / "data").rglob("*.parquet"))
    assert len(files) == 8
    return [row for file in files for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize("rows", ["steps", "chunks"])
def test_a_recorded_data_set_is_opened(tmp_path: Path, rows: str) -> None:
    table = record(tmp_path / "set", rows)
    in_lerobot("dataset", tmp_path / "set", tmp_path / "rows.npz")
    found = np.load(tmp_path / "rows.npz")
    assert found["counts"].tolist() == [8, len(table), 10]
    for name in ("action", "observation.state", "next.reward", "next.success", "episode_index", "index", "timestamp"):
        assert np.array_equal(found[name], np.array([row[name] for row in table], found[name].dtype)), name
    for camera in ("overhead", "wrist"):
        name = f"observation.images.{camera}"
        images = np.stack([np.asarray(Image.open(io.BytesIO(row[name]["bytes"]))) for row in table])
        assert np.array_equal(np.round(found[name] * 255).astype(np.uint8), images.transpose(0, 3, 1, 2))
        assert found[f"stats/{name}"].ravel() == pytest.approx((images / 255).mean((0, 1, 2)), abs=0.05)
    assert len(set(found["tasks"].tolist())) == 8
    actions = found["action"].reshape(-1, found["action"].shape[-1])
    assert found["stats/action"] == pytest.approx(actions.mean(0), abs=1e-5)


@pytest.mark.parametrize("rows", ["steps", "chunks"])
def test_lerobot_continues_a_recorded_data_set(tmp_path: Path, rows: str) -> None:
    """`resume`, `add_frame`, `save_episode`, `finalize`; then it opens what both have written."""
    table = record(tmp_path / "set", rows)
    in_lerobot("resume", tmp_path / "set", tmp_path / "rows.npz")
    found = np.load(tmp_path / "rows.npz")
    count = len(table)
    assert found["counts"].tolist() == [10, count + 7, 10]
    assert found["action"][:count].tolist() == np.array([row["action"] for row in table], np.float32).tolist()
    assert found["action"][count:].reshape(7, -1)[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert found["index"].tolist() == list(range(count + 7))
    assert found["tasks"][count:].tolist() == ["appended 0"] * 3 + ["appended 1"] * 4
    every = {name.removeprefix("stats/") for name in found.files if name.startswith("stats/")}
    features = set(found.files) - {f"stats/{name}" for name in every} - {"tasks", "counts"}
    assert every == features, "each feature has statistics, those that lerobot numbers by itself too"
    for name in ("index", "frame_index", "episode_index", "task_index", "timestamp", "action"):
        rows_of_one = found[name].reshape(-1, found[name].shape[-1] if found[name].ndim > 1 else 1)
        assert found[f"stats/{name}"] == pytest.approx(rows_of_one.mean(0), abs=1e-4), name
    with pytest.raises(UserError, match="another program has appended to this data set"):
        LeRobotWriter(tmp_path / "set", fps=10, robot="tabletop")


def export(folder: Path, model: str, **keys: Any) -> Any:
    """Save a small policy as `vla-rl export --format lerobot` writes public sizes, and return it."""
    plugin = load("model", model)
    policy = plugin.build(plugin.config(preset="tiny", **keys), ModelContext(env=ENV, chunk=CHUNK))
    policy.save(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(UNKNOWN, "architecture.json")  # the sizes, which tools/in_lerobot.py gives to lerobot
        (folder / "config.json").write_text(build_config(folder, keys))
    return policy


def write_rows(file: Path, obs: Any, **arrays: Any) -> None:
    images = {f"observation.images.{camera}": to_numpy(image) for camera, image in obs.images.items()}
    np.savez(file, tasks=obs.instructions, state=to_numpy(obs.state), **images, **arrays)


def act(policy: Any, obs: Any) -> Any:
    rows = len(obs)
    return to_numpy(policy.sample_chunk(obs, Noise(0, "test", range(rows), [0] * rows, [0] * rows), True).actions)


def look_at(env: Any, rows: int) -> Any:
    """Return observations whose states are small, so that few actions relative to them are clipped."""
    obs = synthetic.observation(env, rows)
    return attrs.evolve(obs, state=obs.state / 4)


def check_equal(found: Any, ours: Any) -> None:
    """To 1e-5 of the actions' range, which is [-1, 1]; lerobot clips nothing."""
    assert ours.std() > 1e-3, "actions that never change prove nothing"
    assert (abs(ours) < 1).mean() > 0.9, "actions that are clipped prove nothing"
    assert abs(np.clip(found, -1, 1) - ours).max() < 1e-5


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("pi0", {}),
        ("pi05", {"state_in_prompt": "exact"}),
        ("pi05", {"state_in_prompt": "none"}),
        ("smolvla", {}),
        ("pi0", RELATIVE),
        ("pi05", RELATIVE),
        ("smolvla", RELATIVE),
    ],
    ids=["pi0", "pi05", "pi05 blind", "smolvla", "relative pi0", "relative pi05", "relative smolvla"],
)
def test_an_exported_checkpoint_acts_alike(tmp_path: Path, model: str, keys: dict[str, Any]) -> None:
    """With the same noise and the run's own denoising steps."""
    policy = export(tmp_path / "model", model, denoise_steps=3, **keys)
    obs = look_at(ENV, ROWS)
    ours = act(policy, obs)
    write_rows(tmp_path / "seen.npz", obs, noise=np.zeros((1, *policy._shape), np.float32))
    in_lerobot("policy", tmp_path / "model", tmp_path / "seen.npz", tmp_path / "actions.npz")
    check_equal(np.load(tmp_path / "actions.npz")["actions"][:, :CHUNK], ours)


@pytest.mark.parametrize("keys", [{}, RELATIVE], ids=["absolute", "relative"])
def test_lerobot_eval_executes_the_same_actions(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Chunks of absolute actions are executed whole; of relative ones, to which it adds the state of each step, the
    first action."""
    policy = export(tmp_path / "model", "pi0", denoise_steps=3, **keys)
    obs = look_at(attrs.evolve(ENV, tasks=ENV.tasks[:1]), 2 * CHUNK)
    write_rows(tmp_path / "seen.npz", obs)
    in_lerobot("evaluate", tmp_path / "model", tmp_path / "seen.npz", tmp_path / "actions.npz")
    chunks = act(policy, obs)
    ours = chunks[:, 0] if keys else np.concatenate(chunks[::CHUNK])
    check_equal(np.load(tmp_path / "actions.npz")["actions"], ours)
