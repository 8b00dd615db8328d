"""Every algorithm trains every model on the built-in simulator."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from vla_rl.core.manager import hookimpl
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run

MODELS: dict[str, dict[str, Any]] = {
    "openvla": {"cameras": ["wrist"]},
    "openvla_oft": {},
    "pi0": {"cameras": ["wrist"], "denoise_steps": 2},
    "pi05": {"cameras": ["wrist"], "denoise_steps": 2},
    "smolvla": {"cameras": ["wrist"], "denoise_steps": 2},
    "gr00t": {"cameras": ["wrist"], "denoise_steps": 2},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo": {},
    "gipo": {},
    "srpo": {"encoder": "tiny", "frames": 4, "image_size": 32},
}


@hookimpl(wraps="env")
def chunk_step(actions):
    """A lottery on the actions in addition to the task, so that random weights succeed now and then."""
    result = yield
    won = (torch.as_tensor(actions).double().sum((1, 2)) * 1e4).long() % 4 == 0
    last = torch.zeros_like(result.terminated)
    last[:, -1] = won & ~result.terminated.any(1)
    return evolve(
        result,
        success=result.success | won,
        succeeded=result.succeeded | last,
        terminated=result.terminated | last,
        rewards=result.rewards + last.to(result.rewards.dtype),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("model", MODELS)
def test_it_trains(tmp_path, model, algorithm):
    spec = parse_spec(
        {
            "name": "combination",
            "plugins": [__file__],
            "model": {"type": model, "preset": "tiny", **MODELS[model]},
            "env": {"type": "tabletop", "num_envs": 16, "tasks": ["pick_red"]},
            "rollout": {"chunk": 4, "episodes": 16, "group_size": 8, "max_steps": 12},
            "algorithm": {"type": algorithm, **ALGORITHMS[algorithm]},
            "runtime": {"backend": "local"},
            "train": {"steps": 1, "epochs": 2, "lr": 1e-3, "micro_batch": 16},
            "eval": {"before": False, "episodes_per_task": 2},
            "hooks": [{"type": "jsonl"}],
        }
    )
    results = run(spec, tmp_path / "run", False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "policy/approx_kl" in line]
    assert results["success"]["n"] == 2 and len(steps) == 1
    for line in steps:
        assert 0 < line["env/success_rate"] < 1
        assert line["policy/grad_norm"] > 0
        assert 0 < line["policy/approx_kl"] < 1, "later optimiser steps see a policy that moved"
        assert all(math.isfinite(v) for v in line.values() if isinstance(v, float))
        assert ("value/explained_variance" in line) == (algorithm in ("ppo", "gipo"))


@pytest.mark.parametrize("model", [*MODELS, "film_resnet"])
def test_a_resumed_run_of_two_tasks_equals_a_whole_one(tmp_path, model):
    """Bit for bit, critic included: which env plays which ticket hangs on nothing that a checkpoint lacks."""

    def train_until(step: int, folder: Path, resume: bool = False) -> None:
        spec = {
            "name": "two-tasks",
            "plugins": [__file__],
            "model": {"type": model, "preset": "tiny", **MODELS[model]} if model in MODELS else {"type": model},
            "env": {"type": "tabletop", "num_envs": 8, "tasks": ["pick_red", "put_red"]},
            "rollout": {"chunk": 4, "episodes": 20, "max_steps": 12},
            "algorithm": {"type": "ppo"},
            "runtime": {"backend": "local"},
            "train": {"steps": step, "lr": 1e-3, "micro_batch": 20, "checkpoint_every": 1},
            "eval": {"every": 2, "episodes_per_task": 2},
            "hooks": [{"type": "jsonl"}],
        }
        run(parse_spec(spec), folder, resume)

    def read_weights(folder: Path) -> dict[str, bytes]:
        model_folder = folder / "checkpoints" / "last" / "model"
        return {file.name: file.read_bytes() for file in model_folder.rglob("*.safetensors")}

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_until(4, whole)
    train_until(2, parts)
    train_until(4, parts, resume=True)
    weights = read_weights(whole)
    assert weights and read_weights(parts) == weights
