"""Where a checkpoint lies, what its config.json says, and the statistics that scale actions and state.

Light: a spec is checked with it. Two public layouts are read:
lerobot: config.json with `type: pi0`, policy_preprocessor.json and the safetensors file that its normaliser names.
openpi: config.json with `action_horizon`, `assets/<asset id>/norm_stats.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_rl.core.errors import CheckpointError, did_you_mean
from vla_rl.core.spec.structure import at
from vla_rl.core.types import Context
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.toolkit.models import lerobot
from vla_rl.toolkit.models.checkpoints import find_tokenizer, find_weights, folder_of, read_json
from vla_rl.toolkit.models.fitting import check_horizon, known_action_dim
from vla_rl.toolkit.models.lerobot import PREPROCESSOR, Scale, Statistics

OPENPI_STATISTICS = "norm_stats.json"
WANTED = ("*.json", "*.safetensors")
"""Files of a hub repository that are read."""
OPENPI_EPS = 1e-6


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of either layout. Raises CheckpointError for another model."""
    raw = read_json(folder / "config.json")
    if raw.get("type") == "pi0" or ("action_horizon" in raw and "type" not in raw):
        return raw
    kind = raw.get("type", raw.get("model_type"))
    raise CheckpointError(
        f"{folder / 'config.json'} describes a model of type {kind!r}; pi0 reads lerobot's layout (`type: pi0`) and "
        "openpi's (`action_horizon`)"
    )


def read_statistics(folder: Path, raw: Mapping[str, Any], asset_id: str | None) -> Statistics:
    """Statistics of the folder, lerobot's before openpi's. Raises CheckpointError when there are none: a checkpoint
    is never used with actions that are not scaled."""
    if (folder / PREPROCESSOR).is_file():
        if asset_id is not None:
            raise CheckpointError(
                f"asset_id chooses among openpi's statistics; {folder} has lerobot's, which are one set"
            )
        return lerobot.read_statistics(folder, raw)
    files = {path.parent.relative_to(folder): path for path in sorted(folder.rglob(OPENPI_STATISTICS))}
    known = {path.as_posix().removeprefix("assets/"): file for path, file in files.items()}
    if not known:
        raise CheckpointError(
            f"{folder} has no statistics to scale actions and state with: neither {PREPROCESSOR} (lerobot) nor "
            f"assets/<asset id>/{OPENPI_STATISTICS} (openpi)"
        )
    if asset_id is None and len(known) > 1:
        raise CheckpointError(f"{folder} has several statistics; set asset_id to one of: {', '.join(known)}")
    chosen = next(iter(known)) if asset_id is None else asset_id
    if chosen not in known:
        raise CheckpointError(
            f"no statistics {chosen!r} in {folder}; there are: {', '.join(known)}{did_you_mean(chosen, known)}"
        )
    return _openpi(known[chosen])


def _openpi(path: Path) -> Statistics:
    """z-scores; openpi adds 1e-6 to the deviation in both directions, which is put into the deviation here."""
    entries = read_json(path).get("norm_stats", {})

    def scale(name: str) -> Scale:
        if not {"mean", "std"} <= set(entries.get(name) or {}):
            raise CheckpointError(f"{path} has no mean and std of {name!r}; it has: {', '.join(entries) or 'nothing'}")
        mean, std = entries[name]["mean"], entries[name]["std"]
        dim = max((i + 1 for i, pair in enumerate(zip(mean, std, strict=True)) if any(pair)), default=0)  # no padding
        deviations = tuple(float(s) + OPENPI_EPS for s in std[:dim])
        return Scale(mode="MEAN_STD", values=(tuple(map(float, mean[:dim])), deviations), dim=dim, eps=0.0)

    return Statistics(action=scale("actions"), state=scale("state"))


def check(config: Pi0Config, context: Context) -> None:
    """For `Plugin.check`: the folder is complete and of this model, and holds chunks as long as the spec's."""
    if config.checkpoint is None:
        return
    with at("checkpoint"):
        folder = folder_of(config.checkpoint)
        if folder is None:
            return
        raw = read_config(folder)
        check_horizon(folder, horizon(raw), context.chunk)
        find_weights(folder)
    with at("checkpoint" if config.asset_id is None else "asset_id"):
        read_statistics(folder, raw, config.asset_id)
    with at("checkpoint" if config.tokenizer is None else "tokenizer"):
        find_tokenizer(folder, config.tokenizer)


def horizon(raw: Mapping[str, Any]) -> int:
    """H, actions in a denoised chunk, by config.json of either layout."""
    return int(raw.get("action_horizon", raw.get("chunk_size", 50)))


def action_dim(config: Pi0Config) -> int | None:
    """Numbers of an action as the checkpoint's statistics have it, where that is known (`known_action_dim`)."""

    def read(folder: Path) -> int:
        return read_statistics(folder, read_config(folder), config.asset_id).action.dim

    return known_action_dim(config.checkpoint, read, WANTED)
