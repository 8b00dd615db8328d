"""The model within runs: warm start, PPO with a critic, checkpoints, on the built-in simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_cases import noise

from recordings import write_lerobot
from vla_rl.core import catalogue as plugins
from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.plugins.models.pi0.builder import build_policy
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.runtime.run_folder.folder import read_state
from vla_rl.runtime.start import clone, evaluate, run
from vla_rl.serving.policy import open_policy

NAMED = 'from vla_rl.plugins.models.pi0 import plugin\nvla_rl_plugins = {"model": {"pi0_of_the_test": plugin}}\n'


def test_a_run_on_the_built_in_simulator(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(NAMED)
    spec: dict[str, Any] = {
        "name": "pi0",
        "seed": 0,
        "plugins": [str(tmp_path / "named.py")],
        "model": {"type": "pi0_of_the_test", "preset": "tiny", "denoise_steps": 2},
        "env": {"type": "tabletop", "num_envs": 4, "tasks": ["pick_red"]},
        "rollout": {"chunk": 4, "episodes": 4},
        "bc_warmup": {"episodes": 4, "epochs": 1, "lr": 1e-3, "batch": 8},
        "algorithm": {"type": "ppo"},
        "runtime": {"backend": "local"},
        "train": {"steps": 2, "lr": 1e-3, "micro_batch": 8},
        "eval": {"episodes_per_task": 2},
        "hooks": [{"type": "jsonl"}],
    }
    results = run(parse_spec(spec), tmp_path / "run", False)
    assert results["success"]["n"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "policy/approx_kl" in line]
    assert len(steps) == 2
    for line in steps:  # one optimiser step a rollout: the policy is still the one that sampled
        assert abs(line["policy/approx_kl"]) < 1e-6
        assert line["loss/clip_fraction"] == 0
        assert line["policy/grad_norm"] > 0
    folder = tmp_path / "run" / "checkpoints" / "step_000002" / "model"
    env = plugins.build("env", "tabletop", parse_spec(spec).env.config, EnvContext(num_envs=1))
    model = build_policy(Pi0Config(checkpoint=str(folder), denoise_steps=2), ModelContext(env=env.info, chunk=4))
    assert model.sample_chunk(env.observe_envs(), noise(1), True).actions.shape == (1, 4, 3)


def named_targets(folder: Path, differences: tuple[int, ...] = ()) -> None:
    """Write five episodes of a hand that moves to targets near it. The state has its numbers in another order than the
    actions, by name. Episodes `differences` hold what is left of a target without the state."""
    rng, episodes = np.random.default_rng(0), []
    for number in range(5):
        state = rng.uniform(0.2, 0.8, (9, 4)).astype(np.float32)
        moves = rng.normal(0, 0.02, (8, 2)).astype(np.float32)
        targets = moves if number in differences else state[:-1, [1, 0]] + moves
        grip = rng.choice([-1.0, 1.0], (8, 1)).astype(np.float32)
        images = {camera: rng.integers(0, 256, (9, 32, 32, 3), np.uint8) for camera in ("overhead", "wrist")}
        actions = np.concatenate([targets, grip], axis=1)
        episodes.append({"actions": actions, "state": state, "images": images, "instruction": "pick up the red block"})
    write_lerobot(folder, episodes, 3, video=False)
    info = json.loads((folder / "meta" / "info.json").read_text())
    info["features"]["action"]["names"] = ["x", "y", "gripper"]
    info["features"]["observation.state"]["names"] = ["y", "x", "gripper", "held"]
    (folder / "meta" / "info.json").write_text(json.dumps(info))


def relative_spec(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "relative",
        "model": {"type": "pi0", "preset": "tiny", "denoise_steps": 2, "actions": {"relative_to": "state"}},
        "env": {"type": "tabletop", "num_envs": 4, "tasks": ["pick_red"], "image_size": 32},
        "rollout": {"chunk": 4, "episodes": 4},
        "imitation": {
            "data": {"type": "lerobot", "folder": str(folder)},
            "statistics": "data",
            "steps": 2,
            "batch": 8,
            "lr": 1e-3,
        },
        "algorithm": {"type": "ppo"},
        "runtime": {"backend": "local"},
        "train": {"steps": 1, "lr": 1e-3, "micro_batch": 8},
        "eval": {"before": False, "episodes_per_task": 2},
        **changes,
    }


def test_actions_relative_to_the_state_through_a_run(tmp_path: Path) -> None:
    """The data name which number belongs to which; the simulator has no names. Cloned, evaluated, served and trained
    further, from the run and from its model's folder alone, with the spec as it is."""
    named_targets(tmp_path / "data")
    spec = relative_spec(tmp_path / "data")
    clone(parse_spec(spec), tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "last"
    scaling = read_state(checkpoint).scaling
    assert scaling is not None and scaling["action"]["relative_to"] == [1, 0, -1]
    assert np.abs(scaling["action"]["mean"][:2]).max() < 0.3 < np.abs(scaling["state"]["mean"][0])
    results = evaluate(parse_spec(spec), checkpoint.resolve())
    assert len(results["episodes"]) == 2
    policy = open_policy(tmp_path / "run")
    images = {camera: np.full((*size, 3), 128, np.uint8) for camera, size in policy.info.cameras.items()}
    state = np.array([0.1, -0.2, 1.0, -1.0], np.float32)
    served = policy.act(images, state)
    continued = policy.act(images, state + 0.1, previous=served[1:], delay=1)
    assert served.shape == continued.shape == (4, 3)
    folder = checkpoint / "model"
    alone = build_policy(Pi0Config(checkpoint=str(folder), denoise_steps=2), ModelContext(env=policy.info, chunk=4))
    acted = alone.sample_chunk(policy.observation(images, state, None), noise(1), True).actions[0]
    np.testing.assert_allclose(acted, served, atol=1e-5)
    spec["model"] = {**spec["model"], "preset": None, "checkpoint": str(folder)}
    spec["hooks"] = [{"type": "jsonl"}]
    run(parse_spec(spec), tmp_path / "rl")
    lines = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "policy/approx_kl" in line]
    assert abs(step["policy/approx_kl"]) < 1e-6


def test_relative_actions_that_the_data_do_not_hold(tmp_path: Path) -> None:
    named_targets(tmp_path / "data", differences=(1, 3))
    spec = relative_spec(tmp_path / "data")
    with pytest.raises(UserError, match=r"those in episodes 1, 3 are more than 4 times .*exclude: \[1, 3\]"):
        clone(parse_spec(spec), tmp_path / "run")
    spec["imitation"]["data"]["episodes"] = {"exclude": [1, 3]}
    spec["model"]["actions"]["dimensions"] = ["x", "z"]
    with pytest.raises(UserError, match="an action has no number 'z'; its names are: x, y, gripper"):
        clone(parse_spec(spec), tmp_path / "run")
    spec["model"] = {"type": "film_resnet", "network": {"head": {"type": "gaussian"}}, "actions": "absolute"}
    with pytest.raises(UserError, match="actions: unknown key"):
        parse_spec(spec)
