"""Checkpoints in lerobot's layout: the statistics that scale actions and state, and the files of pre- and
post-processing that hold them. Light to import.

A folder has config.json, policy_preprocessor.json and the safetensors file that its normaliser names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.errors import CheckpointError, did_you_mean
from vla_rl.core.spec.structure import said
from vla_rl.toolkit.json_files import path_inside
from vla_rl.toolkit.models.checkpoints import read_file, read_json

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
NORMALIZER = "normalizer_processor"
RELATIVE = ("relative_actions_processor", "delta_actions_processor")
LEROBOT = "model."
"""Before every name of a tensor in lerobot's files."""
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
class FeatureScale:
    """How one feature is normalised, by lerobot's rules."""

    mode: str
    values: tuple[tuple[float, ...], ...]
    """The mode's two statistics, D numbers each; none for IDENTITY."""
    dim: int
    eps: float = 1e-8
    margin: float = 0.0
    """Added to the width of a range in both directions (openpi's quantiles)."""
    flat: bool = False
    """A number whose range is empty becomes 0, and any number becomes that range again (GR00T), in place of eps."""
    clip: bool = False
    """Numbers outside the range count as its ends, in both directions (GR00T N1.7)."""

    def ranges(self) -> list[tuple[float, float]]:
        """Lowest and highest usual number of each dimension: the mode's ends, or a deviation below and above the mean,
        which is exact for a gripper that is as often open as closed. None for IDENTITY."""
        if self.mode == "MEAN_STD":
            mean, deviation = self.values
            return [(m - d, m + d) for m, d in zip(mean, deviation, strict=True)]
        return list(zip(*self.values, strict=True))


@frozen(kw_only=True)
class Statistics:
    action: FeatureScale
    state: FeatureScale | None
    """None: the folder says nothing about a state."""


def read_statistics(folder: Path, raw: Mapping[str, Any]) -> Statistics:
    """By the normaliser of policy_preprocessor.json. Raises CheckpointError when there are none: a checkpoint is never
    used with actions that are not scaled.

    Args:
        raw: config.json.
    """
    steps = read_steps(folder)
    refuse_relative_actions(folder, raw, steps)
    step = next((s for s in steps if s.get("registry_name") == NORMALIZER), None)
    if step is None:
        raise CheckpointError(
            f"{folder / PREPROCESSOR} has no step {NORMALIZER!r}: there are no statistics to scale with"
        )
    where, config = str(folder / PREPROCESSOR), str(folder / "config.json")
    settings = _mapping(where, step, "config")
    tensors = {}
    if "state_file" in step:
        tensors = _tensors(path_inside(folder, str(step["state_file"]), f"{where}: 'state_file'", CheckpointError))
    modes = {**_mapping(config, raw, "normalization_mapping"), **_mapping(where, settings, "norm_map")}
    features = {
        **_mapping(config, raw, "output_features"),
        **_mapping(config, raw, "input_features"),
        **_mapping(where, settings, "features"),
    }

    def scale(feature: str, kind: str) -> FeatureScale:
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
        return FeatureScale(mode=mode, values=values, dim=dim, eps=float(settings.get("eps", 1e-8)))

    if ACTION not in features:
        raise CheckpointError(f"{folder / 'config.json'} names no output feature {ACTION!r}")
    return Statistics(action=scale(ACTION, "ACTION"), state=scale(STATE, "STATE") if STATE in features else None)


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Of lerobot's pre-processing, in order. Raises CheckpointError."""
    steps = read_json(folder / PREPROCESSOR).get("steps", [])
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise CheckpointError(f"{folder / PREPROCESSOR}: 'steps' is to be a list of JSON objects")
    return steps


def _mapping(source: str, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A JSON object within one, empty where there is none. Raises CheckpointError."""
    value = data.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{source}: {key!r} is {said(value)}, a JSON object is expected")
    return value or {}


def check_actions(folder: Path, raw: Mapping[str, Any]) -> None:
    """For a folder whose statistics are not used, and need not be there. Raises CheckpointError for a model whose
    actions are differences to the state."""
    refuse_relative_actions(folder, raw, read_steps(folder) if (folder / PREPROCESSOR).is_file() else ())


def refuse_relative_actions(folder: Path, raw: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> None:
    """Raises CheckpointError for a model whose actions are differences to the state."""
    relative = [s for s in steps if s.get("registry_name") in RELATIVE and (s.get("config") or {}).get("enabled", True)]
    if relative or raw.get("use_relative_actions") or raw.get("use_delta_joint_actions_aloha"):
        raise CheckpointError(
            f"{folder} gives actions relative to the state, which is not supported; use a checkpoint that was trained "
            "on absolute actions"
        )


def model_config(
    statistics: Statistics, cameras: Sequence[str], pixels: int, horizon: int, **own: Any
) -> dict[str, Any]:
    """config.json for a network that did not come from lerobot's layout; `own`: the model's keys, `type` among them."""
    inputs: dict[str, Any] = {f"{IMAGES}{name}": {"type": "VISUAL", "shape": [3, pixels, pixels]} for name in cameras}
    modes = {"VISUAL": "IDENTITY", "ACTION": statistics.action.mode}
    if statistics.state is not None:
        inputs[STATE] = {"type": "STATE", "shape": [statistics.state.dim]}
        modes["STATE"] = statistics.state.mode
    return {
        "type": own.pop("type"),
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": {ACTION: {"type": "ACTION", "shape": [statistics.action.dim]}},
        "normalization_mapping": modes,
        **own,
        "chunk_size": horizon,
        "n_action_steps": horizon,
    }


def rescaled(raw: Mapping[str, Any], statistics: Statistics) -> dict[str, Any]:
    """config.json of a model that these statistics scale; empty where there is none."""
    if not raw:
        return {}
    modes = {**raw.get("normalization_mapping", {}), "ACTION": statistics.action.mode}
    inputs = {name: entry for name, entry in raw.get("input_features", {}).items() if name != STATE}
    if statistics.state is not None:
        modes["STATE"] = statistics.state.mode
        inputs[STATE] = {"type": "STATE", "shape": [statistics.state.dim]}
    outputs = {ACTION: {"type": "ACTION", "shape": [statistics.action.dim]}}
    return {**raw, "normalization_mapping": modes, "input_features": inputs, "output_features": outputs}


def write_processors(
    raw: Mapping[str, Any], statistics: Statistics, prompt: Sequence[str], tokenizer: str, normalise_first: bool
) -> dict[str, bytes]:
    """lerobot's pre- and post-processing files with these statistics, by name.

    Args:
        raw: config.json.
        prompt: names of the steps that make the prompt of the instruction.
        tokenizer: its name on the hub.
        normalise_first: before the prompt, which then holds the state; else last.
    """
    settings = {
        "eps": statistics.action.eps,
        "features": {**raw["input_features"], **raw["output_features"]},
        "norm_map": raw["normalization_mapping"],
    }
    tokens = {
        "max_length": raw["tokenizer_max_length"],
        "task_key": "task",
        "padding_side": "right",
        "padding": raw.get("pad_language_to", "max_length"),
        "truncation": True,
        "tokenizer_name": tokenizer,
    }
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    start = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
    ]
    text = [{"registry_name": name, "config": {}} for name in prompt]
    text.append({"registry_name": "tokenizer_processor", "config": tokens})
    at = len(start) if normalise_first else len(start) + len(text) + 1
    before, after = (f"policy_preprocessor_step_{at}_{NORMALIZER}", f"policy_postprocessor_step_0_un{NORMALIZER}")
    scaling = {"registry_name": NORMALIZER, "config": settings, "state_file": f"{before}.safetensors"}
    pre = [*start, scaling, *text, device] if normalise_first else [*start, *text, device, scaling]
    outwards = {**settings, "features": raw["output_features"]}
    post = [{"registry_name": f"un{NORMALIZER}", "config": outwards, "state_file": f"{after}.safetensors"}, device]
    tensors = _saved(statistics)
    return {
        PREPROCESSOR: _json({"name": "policy_preprocessor", "steps": pre}),
        POSTPROCESSOR: _json({"name": "policy_postprocessor", "steps": post}),
        f"{before}.safetensors": tensors,
        f"{after}.safetensors": tensors,
    }


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _saved(statistics: Statistics) -> bytes:
    from safetensors.torch import save
    from torch import tensor

    tensors = {}
    for feature, scale in ((ACTION, statistics.action), (STATE, statistics.state)):
        for name, values in zip(MODES[scale.mode], scale.values, strict=True) if scale is not None else ():
            tensors[f"{feature}.{name}"] = tensor(values)
        if scale is not None and scale.margin:
            tensors[f"{feature}.{MODES[scale.mode][1]}"] += scale.margin
    return save(tensors)


def _tensors(path: Path) -> dict[str, tuple[float, ...]]:
    from safetensors.numpy import load_file

    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no statistics to scale with: {path.name} is missing")
    return {name: tuple(array.reshape(-1).tolist()) for name, array in read_file(path, load_file).items()}
