"""N1.7's robots: processor_config.json, statistics.json and embodiment_id.json, as NVIDIA's processor saves them. Light
to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.gr00t.robots import Robot, as_json, choose, choose_new, scale
from vla_rl.toolkit.models.checkpoints import read_json
from vla_rl.toolkit.models.lerobot import FeatureScale, Statistics

PROCESSOR, STATISTICS, ROWS = "processor_config.json", "statistics.json", "embodiment_id.json"
SETTINGS = "processor_kwargs"
FIXED = {
    "use_mean_std": False,
    "exclude_state": False,
    "letter_box_transform": False,
    "use_tactile": False,
    "use_albumentations": True,
}
"""Of the processor's settings: what is not built otherwise."""
ONE = {"video": "frame", "state": "state"}
"""Of which a policy sees the last."""


def read_processor(folder: Path, config: GrootConfig, measured: Statistics | None = None) -> Robot:
    """Raises CheckpointError for a robot that is not in the files (unless the run has `measured` its data's
    statistics), and for inputs and actions that are not built."""
    path, told, numbers = (folder / name for name in (PROCESSOR, STATISTICS, ROWS))
    settings = read_json(path).get(SETTINGS, {})
    for name, value in FIXED.items():
        if settings.get(name, value) != value:
            raise CheckpointError(f"{path}: {name} {settings[name]!r} is not supported, {value!r} is")
    kinds, rows = settings.get("modality_configs", {}), read_json(numbers)
    statistics = read_json(told) if measured is None or told.is_file() else {}
    both = (name for name in statistics if name in kinds)
    tag = (choose if measured is None else choose_new)(told, both, config.embodiment)
    if tag not in rows:
        raise CheckpointError(f"{numbers} has no row for embodiment {tag!r}; it has: {', '.join(rows)}")
    robot = kinds.get(tag, {})
    _refuse(f"{path}, embodiment {tag!r}", robot, settings)
    keys = {part: tuple(robot.get(part, {}).get("modality_keys", ())) for part in ("video", "state", "action")}
    if measured is None:
        action_keys, state_keys = config.action_keys or keys["action"], config.state_keys or keys["state"]
        measured = _statistics(told, statistics[tag], action_keys, state_keys, settings)
        files = {file.name: file.read_bytes() for file in (path, told, numbers)}
    else:
        files = {}
    size, crop = settings.get("image_target_size"), settings.get("image_crop_size")
    edge = settings.get("shortest_image_edge", 256) or (size and size[0])
    part = settings.get("crop_fraction", 0.95) or (crop and size and crop[0] / size[0])
    if not edge or not part:
        raise CheckpointError(f"{path} does not say how images are scaled (shortest_image_edge, crop_fraction)")
    return Robot(
        tag=tag,
        row=int(rows[tag]),
        statistics=measured,
        cameras=keys["video"],
        files=files,
        actions=len(robot.get("action", {}).get("delta_indices") or ()) or None,
        pixels=int(edge),
        crop=float(part),
        formal=bool(settings.get("formalize_language", True)),
    )


def _statistics(
    path: Path, ranges: Mapping[str, Any], action: Sequence[str], state: Sequence[str], settings: Mapping[str, Any]
) -> Statistics:
    """By these keys of one robot's ranges."""
    rules: dict[str, Any] = {"quantiles": bool(settings.get("use_percentiles", False)), "near": 1e-5}
    clip = bool(settings.get("clip_outliers", True))
    return Statistics(
        action=scale(path, ranges.get("action", {}), action, "action", clip=True, **rules),
        state=scale(path, ranges.get("state", {}), state, "state", clip=clip, **rules) if state else None,
    )


def _refuse(where: str, robot: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """What a robot's state, actions and images are that this plugin does not make."""
    for part, what in ONE.items():
        seen = robot.get(part, {}).get("delta_indices") or (0,)
        if list(seen) != [0]:
            raise CheckpointError(f"{where}: it sees more than the last {what} (delta_indices {list(seen)})")
    for part in ("state", "action"):
        if robot.get(part, {}).get("mean_std_embedding_keys"):
            raise CheckpointError(f"{where}: {part} keys scaled by mean and deviation are not supported")
    if settings.get("apply_sincos_state_encoding") and robot.get("state", {}).get("sin_cos_embedding_keys"):
        raise CheckpointError(f"{where}: angles as sines and cosines are not supported")
    forms = robot.get("action", {}).get("action_configs") or ()
    kinds = {str(form.get("rep", "")).rpartition(".")[2].lower() for form in forms if form}
    if settings.get("use_relative_action") and "relative" in kinds:
        raise CheckpointError(
            f"{where} gives actions relative to the state, which is not supported; use a checkpoint that was trained "
            "on absolute actions"
        )


def processor_of(
    robot: Robot, statistics: Statistics, cameras: Sequence[str], pixels: int, shape: Any
) -> dict[str, bytes]:
    """The files with one embodiment, whose state and action are one key each."""
    scales = {"state": statistics.state, "action": statistics.action}
    there = {name: scale for name, scale in scales.items() if scale is not None}
    last = {
        "delta_indices": [0],
        "sin_cos_embedding_keys": None,
        "mean_std_embedding_keys": None,
        "action_configs": None,
    }
    kinds: dict[str, Any] = {name: {**last, "modality_keys": [name]} for name in there}
    kinds["action"]["delta_indices"] = list(range(robot.actions or shape.horizon))
    kinds["video"] = {**last, "modality_keys": list(cameras)}
    kinds["language"] = {**last, "modality_keys": ["annotation.human.task_description"]}
    settings = {
        "modality_configs": {robot.tag: kinds},
        "image_crop_size": None,
        "image_target_size": [pixels, pixels],
        "use_albumentations": True,
        "shortest_image_edge": pixels,
        "crop_fraction": robot.crop,
        "letter_box_transform": False,
        "formalize_language": robot.formal,
        "max_state_dim": shape.state_dim,
        "max_action_dim": shape.action_dim,
        "max_action_horizon": shape.horizon,
        "use_percentiles": statistics.action.mode == "QUANTILES",
        "use_mean_std": False,
        "clip_outliers": statistics.state is not None and statistics.state.clip,
        "apply_sincos_state_encoding": False,
        "use_relative_action": False,
        "exclude_state": False,
    }
    return {
        PROCESSOR: as_json({"processor_class": "Gr00tN1d7Processor", SETTINGS: settings}),
        STATISTICS: as_json({robot.tag: {name: {name: _ranges(scale)} for name, scale in there.items()}}),
        ROWS: as_json({robot.tag: robot.row}),
    }


def _ranges(scale: FeatureScale) -> dict[str, list[float]]:
    """The original wants all six; by the settings above it reads one pair."""
    low, high = (list(values) for values in scale.values)
    middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    half = [(b - a) / 2 for a, b in zip(low, high, strict=True)]
    return {"min": low, "max": high, "mean": middle, "std": half, "q01": low, "q99": high}
