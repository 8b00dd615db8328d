"""Chooses the statistics that scale a checkpoint's actions. Light to import: specs are checked with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.openvla.config import RANGES, FamilyConfig, OpenVLAOFTConfig
from vla_rl.plugins.models.openvla.locate import BUILTIN, STATISTICS, WANTED, read_known
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints.files import read_keys
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError, known_number

PARTS = ("action", "proprio")


def choose_statistics(folder: Path, records: Record, unnorm_key: str | None) -> tuple[str, dict[str, Any]]:
    """Name and entry of a data set's statistics; `X` also finds `X_no_noops`. Raises CheckpointError."""
    known = records.data
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
            entry = records.get_record(key)
            for part in PARTS:
                if part in entry.data:
                    _check_part(entry.get_record(part))
            return key, dict(entry.data)
    raise CheckpointError(f"no statistics {unnorm_key!r} in {folder}; there are: {', '.join(known)}")


def check_suites(folder: Path, known: Record, key: str, suites: Sequence[str]) -> None:
    """Raise MismatchError where one set of statistics would scale the actions of a suite that has its own in the
    folder: one policy takes one set.

    Args:
        key: the statistics that are used.
        suites: task suites of the simulator.
    """
    for suite in suites:
        own = [name for name in (suite, f"{suite}_no_noops") if name in known.data]
        if not own or key in own:
            continue
        remedy = "run one suite at a time, each with its own unnorm_key"
        raise MismatchError(
            f"statistics {key!r} of {folder} would scale the actions of suite {suite!r}, which has its own there; "
            f"{remedy if len(suites) > 1 else f'set unnorm_key: {own[0]}'}"
        )


def _check_part(part: Record) -> None:
    """Raises CheckpointError where a list that scales is none, or has another length than the others."""
    lists = {name: part.get_numbers(name) for ends in RANGES.values() for name in ends if name in part.data}
    lengths = {name: len(values) for name, values in lists.items()}
    if part.has_value("mask"):
        mask = part.data["mask"]
        if not isinstance(mask, list) or not all(isinstance(item, bool) for item in mask):
            raise part.build_error("mask", "a list of true and false")
        lengths |= {"mask": len(mask)} if mask else {}
    if len(set(lengths.values())) > 1:
        raise part.error(f"{part.source} has lists of different lengths: {lengths}")


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
    missing = {"q01", "q99"} - set(action)
    dim = len(action.get("max", action.get("q99", ())))
    if not {"min", "max"} <= set(action) or not (missing or "aloha" in key.lower() or dim == TWO_ARMS):
        return "q01_q99"
    two_armed = "are of ALOHA" if "aloha" in key.lower() else f"are of {dim} numbers, as ALOHA's"
    why = f"have no {' and no '.join(sorted(missing))}" if missing else two_armed
    raise CheckpointError(
        f"statistics {key!r} of {folder} {why}. OpenVLA-OFT scales ALOHA (and SimpleVLA-RL RoboTwin) by the smallest "
        "and largest number: set model.statistics_range: min_max if this checkpoint was trained so, else "
        "model.statistics_range: q01_q99"
    )


def action_dim(config: FamilyConfig) -> int | None:
    """Return the number of action dimensions in the checkpoint's statistics, where it is known (`known_number`)."""

    def read_action_dim(folder: Path) -> int:
        known = read_known(folder, read_keys(folder / "config.json"))
        _, entry = choose_statistics(folder, known, config.unnorm_key)
        return len(entry["action"]["q01" if "q01" in entry["action"] else "max"])

    return known_number(config.checkpoint, read_action_dim, WANTED, BUILTIN)
