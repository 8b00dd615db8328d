"""What the tests of the gr00t plugin share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pi0_cases import CHUNK, ENV

from vla_rl.core.contexts import ModelContext
from vla_rl.plugins.models.gr00t.builder import GrootPolicy, build_policy
from vla_rl.plugins.models.gr00t.config import GrootConfig

METADATA = "experiment_cfg/metadata.json"
PARTS = {
    "state": {"x": {"min": [-2.0, 0.0], "max": [2.0, 1.0]}, "gripper": {"min": [0.5, 0.0], "max": [0.5, 4.0]}},
    "action": {"move": {"min": [-0.5, -0.25], "max": [0.5, 0.25]}, "gripper": {"min": [0.0], "max": [1.0]}},
}
"""Statistics of one robot; one number of its state never changes."""


def policy(env: Any = ENV, context: dict[str, Any] | None = None, **config: Any) -> GrootPolicy:
    if "checkpoint" not in config:
        config.setdefault("preset", "tiny")
    return build_policy(GrootConfig(**config), ModelContext(**{"env": env, "chunk": CHUNK, **(context or {})}))


def entry(**parts: Any) -> dict[str, Any]:
    """Return the metadata of one robot in NVIDIA's layout."""
    parts = PARTS | parts
    kinds = {
        part: {key: {"absolute": True, "rotation_type": None, "shape": [len(values["min"])], "continuous": True}}
        for part, keys in parts.items()
        for key, values in keys.items()
    }
    kinds["video"] = {name: {"resolution": [64, 64], "channels": 3, "fps": 10.0} for name in ENV.cameras}
    extra = {"mean": [0.0], "std": [1.0]}  # never read
    statistics = {part: {key: {**extra, **values} for key, values in keys.items()} for part, keys in parts.items()}
    return {"statistics": statistics, "modalities": kinds, "embodiment_tag": "new_embodiment"}


def folder_with(target: Path, metadata: dict[str, Any] | None = None, **head: Any) -> Path:
    """A tiny checkpoint in NVIDIA's layout with the file of ours that small networks need; `head`: other keys of
    config.json's section on the action head."""
    policy().save(target)
    (target / METADATA).write_text(json.dumps({"new_embodiment": entry()} if metadata is None else metadata))
    raw = json.loads((target / "config.json").read_text())
    raw["action_head_cfg"] |= head
    (target / "config.json").write_text(json.dumps(raw))
    return target
