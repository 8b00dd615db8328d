"""The statistics that scale a checkpoint's actions. Light: a spec is checked with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.openvla.config import FamilyConfig
from vla_rl.plugins.models.openvla.locate import BUILTIN, WANTED
from vla_rl.toolkit.models.fitting import known_action_dim

STATISTICS = "dataset_statistics.json"


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


def action_dim(config: FamilyConfig) -> int | None:
    """Numbers of an action as the checkpoint's statistics have it, where that is known (`known_action_dim`)."""

    def read(folder: Path) -> int:
        file = folder / STATISTICS
        known = json.loads(file.read_text()) if file.is_file() else json.loads((folder / "config.json").read_text())
        _, entry = choose_statistics(folder, known if file.is_file() else known["norm_stats"], config.unnorm_key)
        return len(entry["action"]["q01"])

    return known_action_dim(config.checkpoint, read, WANTED, BUILTIN)
