"""`vla-rl eval --refute` names what a policy's success does not depend on."""

from __future__ import annotations

import json
from typing import Any

import pytest

import vla_rl
from vla_rl import UserError

SPEC: dict[str, Any] = {
    "name": "policy",
    "model": {"type": "openvla_oft", "checkpoint": "builtin:tabletop"},
    "env": {"type": "tabletop", "num_envs": 16, "tasks": ["pick_red", "pick_blue"]},
    "rollout": {"chunk": 4, "episodes": 16, "group_size": 8},
    "algorithm": {"type": "grpo"},
    "train": {"steps": 1, "lr": 1e-4, "micro_batch": 64},
    "eval": {"before": False, "episodes_per_task": 16},
    "runtime": {"backend": "local"},
    "hooks": [],
}


def test_each_variant_is_paired_with_the_evaluation(tmp_path):
    vla_rl.run(SPEC, tmp_path)
    lines: list[str] = []
    result = vla_rl.evaluate(tmp_path, refute=True, say=lines.append)
    card = result["refute"]
    names = [entry["name"] for entry in card["entries"]]
    assert names == [
        "instruction of another task",
        "no instruction",
        "camera overhead black",
        "camera wrist black",
        "all cameras black",
        "state zeroed",
        "first chunk repeated",
        "states of training",
    ]
    assert lines[0] == "--refute: 8 variants of 8 episodes, 64 in all" and card["episodes"] == 64
    blind = card["entries"][names.index("all cameras black")]
    assert blind["success"]["n"] == blind["main"]["n"] == 8 and blind["p"] is not None
    assert json.loads((tmp_path / "results.json").read_text())["refute"] == card
    page = vla_rl.report(tmp_path).read_text()
    assert "What success depends on" in page and "camera wrist black" in page
    folder = vla_rl.export(tmp_path, tmp_path / "export", say=lambda line: None)
    assert "| camera wrist black |" in (folder / "README.md").read_text()


def test_a_chunk_of_a_whole_episode_is_an_open_loop():
    spec = {**SPEC, "model": {"type": "film_resnet"}, "rollout": {**SPEC["rollout"], "chunk": 16}}
    plain = vla_rl.evaluate(spec)
    repeated = vla_rl.evaluate(spec, overrides=["eval.ablate={open_loop: true}"])
    assert plain["episodes"] == repeated["episodes"]  # one chunk is the whole episode


def test_a_benchmark_has_no_card():
    with pytest.raises(UserError, match="--until and --refute"):
        vla_rl.evaluate(SPEC, benchmark="tabletop", refute=True)
