"""What the tests of the runtime share: a spec of the test doubles, and how to read a run."""

from __future__ import annotations

import json
from pathlib import Path

MEASURED = ("time/", "throughput/")


def scripted_spec(**changes):
    """A spec of the test doubles that learns within seconds; keyword arguments replace or extend its sections."""
    spec = {
        "name": "scripted",
        "seed": 3,
        "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.apart"],
        "model": {"type": "linear"},
        "env": {"type": "scripted", "num_envs": 8},
        "rollout": {"chunk": 2, "episodes": 16, "group_size": 4},
        "algorithm": {"type": "grpo"},
        "runtime": {"backend": "local"},
        "train": {"steps": 4, "lr": 3e-2, "micro_batch": 8, "global_batch": 16, "epochs": 2},
        "hooks": [{"type": "jsonl"}],
    }
    for name, value in changes.items():
        spec[name] = {**spec[name], **value} if isinstance(value, dict) and isinstance(spec.get(name), dict) else value
    return spec


def read_metrics(folder: Path) -> list[dict]:
    """Every line of metrics.jsonl without what a clock measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines]
