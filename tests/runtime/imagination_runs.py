"""Specs of small runs that practise in a world model, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripted_runs import read_metrics

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run

ORACLE = {"type": "oracle", "env": "tabletop", "keys": ["image_size=16"], "history": 5, "num_envs": 8}
EDM = {
    "type": "edm",
    "history": 2,
    "fold": 4,
    "channels": [16, 16],
    "depths": [1, 1],
    "condition": 16,
    "evaluations": 1,
    "heads": 8,
}
SMALL: dict[str, Any] = {
    "name": "practising",
    "seed": 1,
    "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement"],
    "model": {"type": "linear"},
    "env": {"type": "tabletop", "image_size": 16, "num_envs": 8, "tasks": ["pick_red"]},
    "rollout": {"chunk": 4, "episodes": 16},
    "algorithm": {"type": "ppo"},
    "runtime": {"backend": "local"},
    "world_model": ORACLE,
    "imagination": {
        "per_real": 2,
        "warm_start": 1,
        "fit_updates": 1,
        "fit_updates_below_threshold": 2,
        "fit_batch": 4,
        "evaluated_episodes": 16,
        "buffer": 32,
        "quality_thresholds": None,
    },
    "train": {"steps": 4, "lr": 3e-2, "micro_batch": 32, "checkpoint_every": 2},
    "eval": {"before": False, "episodes_per_task": 2},
    "hooks": [{"type": "jsonl"}],
}


def small(**changes: Any) -> dict[str, Any]:
    """`SMALL`, with sections replaced (`world_model`) or extended."""
    spec = dict(SMALL)
    for name, value in changes.items():
        extends = isinstance(value, dict) and isinstance(spec.get(name), dict) and "type" not in value
        spec[name] = {**spec[name], **value} if extends else value
    return spec


def practise(folder: Path, resume: bool = False, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """-> (results, metrics without times)."""
    results = run(parse_spec(small(**changes)), folder, resume)
    return results, read_metrics(folder)
