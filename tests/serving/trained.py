"""Small runs whose checkpoints are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import run


def spec(**changes: Any) -> dict[str, Any]:
    """The tabletop simulator and a double of one linear layer; keyword arguments replace sections."""
    return {
        "name": "served",
        "seed": 3,
        "plugins": ["vla_rl.testing.scripted"],
        "model": {"type": "linear"},
        "env": {"type": "tabletop", "num_envs": 8, "image_size": 16},
        "rollout": {"chunk": 4, "episodes": 8, "group_size": 4, "max_steps": 12},
        "algorithm": {"type": "grpo"},
        "runtime": {"backend": "local"},
        "train": {"steps": 1, "lr": 1e-1, "micro_batch": 32},
        "eval": {"before": False, "episodes_per_task": 2},
        "hooks": [{"type": "jsonl"}],
        **changes,
    }


def train(folder: Path, **changes: Any) -> Path:
    run(parse_spec(spec(**changes)), folder, False)
    return folder


def sight(policy: Any, seed: int) -> dict[str, Any]:
    """Arguments of `Policy.act`, drawn from a seed."""
    random = np.random.default_rng(seed)
    return {
        "images": {
            camera: random.integers(0, 256, (*size, 3), dtype=np.uint8) for camera, size in policy.info.cameras.items()
        },
        "state": random.normal(size=policy.info.state_dim),
        "instruction": policy.info.tasks[seed % len(policy.info.tasks)].instruction,
    }
