"""Where a checkpoint lies, and the statistics that scale its actions. Light: a spec is checked with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.plugins.models.openvla.config import OpenVLAOFTConfig

BUILTIN = Path(__file__).parent / "checkpoints"
STATISTICS = "dataset_statistics.json"


class CheckpointError(UserError, ValueError):
    """A checkpoint cannot be used; the message says which file and what to do."""


def resolve(name: str) -> Path:
    """`builtin:NAME` or a path -> the folder. Raises CheckpointError when there is none."""
    if name.startswith("builtin:"):
        folder = BUILTIN / name.removeprefix("builtin:")
        if not folder.is_dir():
            there = ", ".join(f"builtin:{p.name}" for p in sorted(BUILTIN.glob("*")) if p.is_dir()) or "none"
            raise CheckpointError(f"no built-in checkpoint {name!r}; there are: {there}")
        return folder
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {name!r} is not a folder (looked at {folder.absolute()})")
    return folder


def choose_statistics(folder: Path, known: Mapping[str, Any], unnorm_key: str | None) -> tuple[str, dict[str, Any]]:
    """Name and entry of a data set's statistics; `X` also finds `X_no_noops`. Raises CheckpointError."""
    if not known:
        raise CheckpointError(
            f"{folder} has no statistics to scale actions with: "
            f"{STATISTICS} is missing and config.json has no norm_stats"
        )
    if unnorm_key is None and len(known) == 1:
        unnorm_key = next(iter(known))
    if unnorm_key is None:
        raise CheckpointError(f"{folder} has several statistics; set unnorm_key to one of: {', '.join(known)}")
    for key in (unnorm_key, f"{unnorm_key}_no_noops"):
        if key in known:
            return key, known[key]
    raise CheckpointError(f"no statistics {unnorm_key!r} in {folder}; there are: {', '.join(known)}")


def action_dim(config: OpenVLAOFTConfig) -> int | None:
    """Numbers of an action as the checkpoint's statistics have it; None for a preset, which adapts, and for a folder
    that cannot be read (which building the model reports in full)."""
    if config.checkpoint is None:
        return None
    try:
        folder = resolve(config.checkpoint)
        file = folder / STATISTICS
        known = json.loads(file.read_text()) if file.is_file() else json.loads((folder / "config.json").read_text())
        _, entry = choose_statistics(folder, known if file.is_file() else known["norm_stats"], config.unnorm_key)
        return len(entry["action"]["q01"])
    except (CheckpointError, OSError, ValueError, KeyError):
        return None
