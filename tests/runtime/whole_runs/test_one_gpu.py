"""Whole runs on one GPU: every way to place roles on it, offload, resume, and a device that is full. They need a GPU and
are skipped elsewhere; the same specs run on CPU slots in the last test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run

pytestmark = [pytest.mark.ray]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "collocated": {"type": "collocated", "workers": 1},
    "collocated, offload": {"type": "collocated", "workers": 1, "offload": {"sim": True, "learner": True}},
    "hybrid, simulator on CPUs": {"type": "hybrid", "sim": "cpu", "policy": 0, "learner": 0},
    "hybrid, halves": {"type": "hybrid", "sim": 0, "policy": 0, "learner": 0, "sim_workers": 1, "pipeline_stages": 2},
    "disaggregated, thirds": {"type": "disaggregated", "sim": 0, "policy": 0, "learner": 0, "share_devices": True},
    "disaggregated, simulator on CPUs": {
        "type": "disaggregated",
        "sim": "cpu",
        "policy": 0,
        "learner": 0,
        "share_devices": True,
    },
}


def spec(placement: dict[str, Any], steps: int = 2, **changes: Any) -> Any:
    data: dict[str, Any] = {
        "name": "one-gpu",
        "model": {"type": "openvla_oft", "preset": "tiny"},
        "env": {"type": "tabletop", "num_envs": 8, "tasks": ["pick_red"]},
        "rollout": {"chunk": 4, "episodes": 8, "max_steps": 8, "compile": "off"},  # the default on a GPU takes a minute
        "algorithm": {"type": "ppo"},
        "placement": placement,
        "train": {"steps": steps, "lr": 1e-3, "micro_batch": 8, "checkpoint_every": 1, "compile": "off"},
        "eval": {"before": False, "episodes_per_task": 1},
        "hooks": [{"type": "jsonl"}],
    }
    return parse_spec(data | changes)


def last_update(folder: Path) -> dict[str, float]:
    """Return the metrics of the last training step, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics: dict[str, float] = [line for line in lines if "policy/grad_norm" in line][-1]
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "throughput/"))}


@pytest.mark.parametrize("name", [pytest.param(name, marks=GPU) for name in PLACEMENTS])
def test_roles_on_one_gpu(name: str, tmp_path: Path) -> None:
    results = run(spec(PLACEMENTS[name], runtime={"require": "cuda"}), tmp_path / "run", resume=False)
    assert results["steps"] == 2
    assert last_update(tmp_path / "run")["policy/grad_norm"] > 0


@pytest.mark.parametrize("backend", [pytest.param(name, marks=GPU) for name in ("local", "ray")])
def test_resume_on_a_gpu(backend: str, tmp_path: Path) -> None:
    runtime = {"backend": backend, "require": "cuda"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(spec(PLACEMENTS["collocated"], 2, runtime=runtime), whole, resume=False)
    run(spec(PLACEMENTS["collocated"], 1, runtime=runtime), parts, resume=False)
    run(spec(PLACEMENTS["collocated"], 2, runtime=runtime), parts, resume=True)
    assert last_update(parts) == pytest.approx(last_update(whole), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
def test_a_run_that_does_not_fit_is_refused_before_it_is_built(tmp_path: Path) -> None:
    model = {"type": "openvla_oft", "preset": "full", "dtype": "bfloat16", "lora": {"rank": 32}}
    large = spec(
        {"type": "collocated", "workers": 1},
        model=model,
        train={"steps": 1, "lr": 1e-3, "micro_batch": 512},
        runtime={"require": "cuda"},
    )
    with pytest.raises(UserError, match=r"(?s)this run does not fit.*train.micro_batch"):
        run(large, tmp_path / "run", resume=False)


@pytest.mark.parametrize("name", ["disaggregated, simulator on CPUs"])
def test_separate_workers_on_one_device(name: str, tmp_path: Path) -> None:
    """Without a GPU: policy and learner on one CPU slot, trained asynchronously."""
    if torch.cuda.is_available():
        pytest.skip("test_roles_on_one_gpu runs it on the GPU")
    asynchrony = {"max_lag": 1}
    results = run(spec(PLACEMENTS[name], asynchrony=asynchrony), tmp_path / "run", resume=False)
    assert results["steps"] == 2
    assert last_update(tmp_path / "run")["policy/grad_norm"] > 0
