"""Runs whose model is in bfloat16: what is trained, acts, is saved and is resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from openvla_cases import policy
from safetensors.torch import load_file

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.run_folder.env_info import read_env_info
from vla_rl.runtime.start import run

LR = 1e-5


def spec(**train: Any) -> Any:
    return parse_spec(
        {
            "name": "narrow",
            "seed": 3,
            "model": {"type": "openvla_oft", "preset": "fast", "dtype": "bfloat16"},
            "plugins": ["vla_rl.testing.scripted"],
            "env": {"type": "scripted", "num_envs": 4},
            "rollout": {"chunk": 4, "episodes": 8, "group_size": 4, "max_steps": 8},
            "algorithm": {"type": "ppo"},
            "runtime": {"backend": "local"},
            "placement": {"type": "collocated", "offload": {"learner": True}},
            "train": {"lr": LR, "micro_batch": 4, "checkpoint_every": 1, "keep_checkpoints": 9, "steps": 3, **train},
            "eval": {"before": False, "episodes_per_task": 1},
            "hooks": [{"type": "jsonl"}],
        }
    )


def steps(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    training = [line for line in lines if "loss/policy" in line]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in training]


def state(folder: Path, step: int) -> dict[str, Any]:
    file = folder / "checkpoints" / f"step_{step:06d}" / "trainer" / "learner.pt"
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow") / "run"
    run(spec(), folder)
    return folder


def test_learning_computes_with_the_weights_that_acted(folder: Path) -> None:
    """With one pass over a rollout every ratio is 1. That would not hold for log-probs of the float32 masters."""
    assert [line["policy/approx_kl"] for line in steps(folder)] == [0.0] * 3


def test_steps_below_the_resolution_of_the_weights_reach_the_masters(folder: Path) -> None:
    first, last = state(folder, 1), state(folder, 3)
    moved = unmoved = 0
    for name, master in last["weights"].items():
        assert master.dtype == torch.float32
        moved += int((master != first["weights"][name]).sum())
        unmoved += int((master == first["weights"][name]).sum())
    assert moved > 3 * unmoved, "some tokens never occur, and their embeddings get no gradient"
    moments = [value for part in last["optimizer"]["state"].values() for value in (part["exp_avg"], part["exp_avg_sq"])]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert all(0 < line["update/weights_changed"] < 0.5 for line in steps(folder)), "bfloat16 shows a part of them"


def test_the_saved_policy_is_the_one_that_acts(folder: Path) -> None:
    masters = state(folder, 3)["weights"]
    checkpoint = folder / "checkpoints" / "step_000003" / "model"
    info = read_env_info(checkpoint.parent)
    model = policy(env=info, checkpoint=str(checkpoint), dtype="bfloat16", context={"values": "chunk"})
    (file,) = checkpoint.glob("model*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    loaded = dict(model.module.named_parameters())
    for name, master in masters.items():
        assert torch.equal(loaded[name], master.to(loaded[name].dtype)), name


def test_a_run_resumes_to_the_same_figures(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy", symlinks=True)
    (copy / "results.json").unlink()
    (copy / "checkpoints" / "last").unlink()
    for step in (2, 3):
        shutil.rmtree(copy / "checkpoints" / f"step_{step:06d}")
    run(spec(), copy, resume=True)
    assert steps(copy) == steps(folder)
    again, wanted = state(copy, 3)["weights"], state(folder, 3)["weights"]
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)
