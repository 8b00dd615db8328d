"""Conversion of a pi0 or pi0.5 folder from lerobot's layout to that of openpi's PyTorch checkpoints.

openpi: model.safetensors without lerobot's prefix, config.json with `action_horizon`, and
`assets/<asset id>/norm_stats.json`. Weights are copied as bytes, whatever their size.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from vla_rl.core.errors import CheckpointError, UserError
from vla_rl.toolkit.json_files import Record, encode_json
from vla_rl.toolkit.models.checkpoints.files import MAX_SIZE, TOKENIZER, WEIGHTS, read_json, unreadable_error
from vla_rl.toolkit.models.checkpoints.lerobot import LEROBOT, FeatureScale, read_statistics
from vla_rl.toolkit.relative_actions import References

MODELS = ("pi0", "pi05")
EPS = 1e-6
"""Number that openpi adds to the standard deviation, or to the range's width."""
RELATIVE = "vla_rl_relative_actions"
"""Our key in config.json, of which openpi reads nothing: for each number of an action the place of the state's number
that it is relative to, -1 for absolute ones. In openpi the training config says it (`DeltaActions`)."""
KEPT = (
    TOKENIZER,
    "architecture.json",
    "value_head.safetensors",
    "noise_head.safetensors",
    "steering_head.safetensors",
    "state_in_prompt.json",
    "instruction.json",
)
"""Files that openpi does not read, and vla-rl does."""
PRECISIONS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def write_openpi(folder: Path, target: Path, asset_id: str) -> None:
    """Write `target` from `folder`, so that actions are normalised to the same numbers. Raise UserError for another
    model, an asset id that leads out of the folder, and what openpi cannot express; CheckpointError for files."""
    raw = read_json(folder / "config.json")
    if raw.get("type") not in MODELS:
        kind = raw.get("type", raw.get("model_type"))
        raise UserError(f"openpi's layout is of {' and '.join(MODELS)}; {folder} holds a model of type {kind!r}")
    if Path(asset_id).is_absolute() or ".." in Path(asset_id).parts or not asset_id.strip("/. "):
        raise UserError(f"{asset_id!r} cannot name statistics; give a name such as physical-intelligence/libero")
    widths = {raw.get("max_action_dim", 32), raw.get("max_state_dim", 32)}
    if len(widths) > 1:
        raise UserError(
            f"{folder} pads actions and state to {sorted(widths)} numbers; openpi has one width for both, so only "
            f"--format own can hold it"
        )
    if has_padded_state(folder):
        raise UserError(f"prompts of {folder} hold a padded state (model.state_in_prompt), as openpi's never do")
    statistics = read_statistics(folder, raw)
    references = statistics.references or ()
    entries = {"actions": _build_entry(statistics.action, 0.0), "state": _build_entry(statistics.state, 1.0)}
    target.mkdir(parents=True, exist_ok=True)
    precision = rename_tensors(folder / WEIGHTS, target / WEIGHTS)
    settings = {
        "action_dim": raw.get("max_action_dim", 32),
        "action_horizon": raw.get("chunk_size", 50),
        "paligemma_variant": raw.get("paligemma_variant", "gemma_2b"),
        "action_expert_variant": raw.get("action_expert_variant", "gemma_300m"),
        "precision": precision,
    }
    if references:
        settings[RELATIVE] = [-1 if place is None else place for place in references]
    (target / "config.json").write_bytes(encode_json(settings))
    assets = target / "assets" / asset_id
    assets.mkdir(parents=True, exist_ok=True)
    (assets / "norm_stats.json").write_bytes(encode_json({"norm_stats": entries}))
    for name in KEPT:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def has_padded_state(folder: Path) -> bool:
    """Return whether the prompts of a saved pi0.5 hold a padded state. Raise CheckpointError."""
    file = folder / "state_in_prompt.json"
    return file.is_file() and read_json(file).get("state_in_prompt") == "padded"


def read_references(raw: Record) -> References | None:
    """Return what actions are relative to by openpi's config.json; None: it does not say. Raise CheckpointError."""
    if not raw.has_value(RELATIVE):
        return None
    return tuple(None if place < 0 else place for place in raw.get_sizes(RELATIVE, -1, MAX_SIZE))


def rename_tensors(source: Path, target: Path) -> str:
    """Copy a weight file without lerobot's prefix, and return most numbers' precision. Raise CheckpointError."""
    if not source.is_file():
        raise CheckpointError(f"{source.parent} is not a complete checkpoint: it has no {source.name}")
    with source.open("rb") as file:
        try:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        except (ValueError, OverflowError, MemoryError) as exc:
            raise unreadable_error(source, exc) from exc
        about = header.pop("__metadata__", {"format": "pt"})
        renamed = {name.removeprefix(LEROBOT): entry for name, entry in header.items()}
        sizes: dict[str, int] = {}
        for entry in renamed.values():
            begin, end = entry["data_offsets"]
            sizes[entry["dtype"]] = sizes.get(entry["dtype"], 0) + end - begin
        text = json.dumps({"__metadata__": about, **renamed}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with target.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(file, out, 1 << 24)
    return PRECISIONS.get(max(sizes, key=lambda dtype: sizes[dtype]), "float32")


def _build_entry(scale: FeatureScale | None, inwards: float) -> dict[str, list[float]]:
    """Return the openpi statistics of a feature. openpi normalises pi0 by mean and deviation, pi0.5 by quantiles: both
    are given, and both lead to the same numbers as this scale in any mode. `inwards` is 1 for the state and 0 for
    actions, to whose deviation lerobot adds nothing."""
    centre, half = ([], []) if scale is None else _centre_and_width(scale, inwards)
    return {
        "mean": centre,
        "std": [max(width - EPS, 0.0) for width in half],
        "q01": [middle - width for middle, width in zip(centre, half, strict=True)],
        "q99": [middle + width - EPS for middle, width in zip(centre, half, strict=True)],
    }


def _centre_and_width(scale: FeatureScale, inwards: float) -> tuple[list[float], list[float]]:
    """Return the centre and half width of each dimension; a number is normalised to (number - centre) / half width."""
    if scale.mode == "IDENTITY":
        return [0.0] * scale.dim, [1.0] * scale.dim
    first, second = scale.values
    if scale.mode == "MEAN_STD":
        return list(first), [deviation + inwards * scale.eps for deviation in second]
    widths = [(high - low + scale.margin) or scale.eps for low, high in zip(first, second, strict=True)]
    return [low + width / 2 for low, width in zip(first, widths, strict=True)], [width / 2 for width in widths]
