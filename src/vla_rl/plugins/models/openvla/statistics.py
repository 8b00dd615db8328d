"""Chooses the statistics that scale a checkpoint's actions. Light to import: specs are checked with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.openvla.config import FamilyConfig, OpenVLAOFTConfig
from vla_rl.plugins.models.openvla.locate import BUILTIN, WANTED
from vla_rl.toolkit.models.checkpoints import read_json
from vla_rl.toolkit.models.fitting import known_action_dim

STATISTICS = "dataset_statistics.json"


def choose_statistics(folder: Path, known: Mapping[str, Any], unnorm_key: str | None) -> tuple[str, dict[str, Any]]:
    """Return name and entry of a data set's statistics; `X` also finds `X_no_noops`. Raise CheckpointError."""
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


TWO_ARMS = 14
"""Number of action dimensions of ALOHA and of RoboTwin."""


def choose_range(
    folder: Path, key: str, entry: Mapping[str, Any], setup: Mapping[str, Any], config: FamilyConfig
) -> str:
    """Return the statistics to scale by, a name of RANGES: the spec's, else those of the checkpoint's training, else
    those of LIBERO. Raise CheckpointError where the statistics evidently need others and nothing says so.

    Args:
        setup: settings of the policy's training, as far as the folder records them.
    """
    if not isinstance(config, OpenVLAOFTConfig):
        return "q01_q99"
    if config.statistics_range is not None:
        return config.statistics_range
    if setup:
        return str(setup.get("statistics_range", "q01_q99"))
    action = entry.get("action", {})
    lacking = {"q01", "q99"} - set(action)
    dim = len(action.get("max", action.get("q99", ())))
    if not {"min", "max"} <= set(action) or not (lacking or "aloha" in key.lower() or dim == TWO_ARMS):
        return "q01_q99"
    two_armed = "are of ALOHA" if "aloha" in key.lower() else f"are of {dim} numbers, as ALOHA's"
    why = f"have no {' and no '.join(sorted(lacking))}" if lacking else two_armed
    raise CheckpointError(
        f"statistics {key!r} of {folder} {why}. OpenVLA-OFT scales ALOHA (and SimpleVLA-RL RoboTwin) by the smallest "
        "and largest number: set model.statistics_range: min_max if this checkpoint was trained so, else "
        "model.statistics_range: q01_q99"
    )


def action_dim(config: FamilyConfig) -> int | None:
    """Return the number of action dimensions in the checkpoint's statistics, where it is known (`known_action_dim`)."""

    def read(folder: Path) -> int:
        file = folder / STATISTICS
        known = read_json(file) if file.is_file() else read_json(folder / "config.json")["norm_stats"]
        _, entry = choose_statistics(folder, known, config.unnorm_key)
        return len(entry["action"]["q01" if "q01" in entry["action"] else "max"])

    return known_action_dim(config.checkpoint, read, WANTED, BUILTIN)
