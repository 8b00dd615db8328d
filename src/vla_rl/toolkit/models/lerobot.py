"""Checkpoints in lerobot's layout: the statistics that scale actions and state. Light to import.

A folder has config.json, policy_preprocessor.json and the safetensors file that its normaliser names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.errors import CheckpointError, did_you_mean
from vla_rl.toolkit.models.checkpoints import read_file, read_json

PREPROCESSOR, NORMALIZER = "policy_preprocessor.json", "normalizer_processor"
ACTION, STATE, IMAGES = "action", "observation.state", "observation.images."
MODES = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "IDENTITY": (),
}
"""lerobot's normalisation modes and the two statistics that each needs."""


@frozen(kw_only=True)
class Scale:
    """How one feature is normalised, by lerobot's rules."""

    mode: str
    values: tuple[tuple[float, ...], ...]
    """The mode's two statistics, D numbers each; none for IDENTITY."""
    dim: int
    eps: float = 1e-8


@frozen(kw_only=True)
class Statistics:
    action: Scale
    state: Scale | None
    """None: the folder says nothing about a state."""


def read_statistics(folder: Path, raw: Mapping[str, Any]) -> Statistics:
    """By the normaliser of policy_preprocessor.json. Raises CheckpointError when there are none: a checkpoint is never
    used with actions that are not scaled.

    Args:
        raw: config.json.
    """
    steps = read_json(folder / PREPROCESSOR).get("steps", [])
    step = next((s for s in steps if s.get("registry_name") == NORMALIZER), None)
    if step is None:
        raise CheckpointError(
            f"{folder / PREPROCESSOR} has no step {NORMALIZER!r}: there are no statistics to scale with"
        )
    settings = step.get("config", {})
    tensors = _tensors(folder / step["state_file"]) if "state_file" in step else {}
    modes = {**raw.get("normalization_mapping", {}), **settings.get("norm_map", {})}
    features = {**raw.get("output_features", {}), **raw.get("input_features", {}), **settings.get("features", {})}

    def scale(feature: str, kind: str) -> Scale:
        mode = modes.get(kind, "IDENTITY")
        if mode not in MODES:
            raise CheckpointError(f"{folder}: normalisation {mode!r} is not known{did_you_mean(mode, MODES)}")
        names = [f"{feature}.{statistic}" for statistic in MODES[mode]]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise CheckpointError(
                f"{folder} normalises {feature!r} by {mode} and lacks {', '.join(missing)}; the statistics there are: "
                f"{', '.join(sorted(tensors)) or 'none'}"
            )
        values = tuple(tensors[name] for name in names)
        dim = len(values[0]) if values else int(features[feature]["shape"][0])
        return Scale(mode=mode, values=values, dim=dim, eps=float(settings.get("eps", 1e-8)))

    if ACTION not in features:
        raise CheckpointError(f"{folder / 'config.json'} names no output feature {ACTION!r}")
    return Statistics(action=scale(ACTION, "ACTION"), state=scale(STATE, "STATE") if STATE in features else None)


def _tensors(path: Path) -> dict[str, tuple[float, ...]]:
    from safetensors.numpy import load_file

    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no statistics to scale with: {path.name} is missing")
    return {name: tuple(array.reshape(-1).tolist()) for name, array in read_file(path, load_file).items()}
