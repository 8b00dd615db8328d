"""Robots of N1.7: processor_config.json, statistics.json and embodiment_id.json, as NVIDIA's processor saves them.
Light to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.gr00t.robots import Robot, as_json, choose_embodiment, choose_new_embodiment, read_scale
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints import MAX_CHUNK, MAX_PIXELS, MAX_SIZE, read_keys
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
"""Settings of the processor with the only value that is supported."""
ONE = {"video": "frame", "state": "state"}
"""Inputs of which a policy sees only the last time step -> their name in messages."""


def read_processor(folder: Path, config: GrootConfig, measured: Statistics | None = None) -> Robot:
    """Return the robot that the spec asks for. Raise CheckpointError for one that is not in the files (unless the run
    has `measured` its data's statistics), and for inputs and actions that are not supported."""
    path, statistics_file, numbers = (folder / name for name in (PROCESSOR, STATISTICS, ROWS))
    settings = read_keys(path).get_section(SETTINGS)
    for name, value in FIXED.items():
        if settings.data.get(name, value) is not value:
            raise CheckpointError(f"{path}: {name} {settings.data[name]!r} is not supported, {value!r} is")
    kinds, rows = settings.get_section("modality_configs"), read_keys(numbers)
    empty = Record(source=str(statistics_file), data={}, error=CheckpointError)
    statistics = read_keys(statistics_file) if measured is None or statistics_file.is_file() else empty
    embodiments = (name for name in statistics.data if name in kinds.data)
    tag = (choose_embodiment if measured is None else choose_new_embodiment)(
        statistics_file, embodiments, config.embodiment
    )
    if tag not in rows.data:
        raise CheckpointError(f"{numbers} has no row for embodiment {tag!r}; it has: {', '.join(rows.data)}")
    robot = kinds.get_section(tag)
    _check_supported(f"{path}, embodiment {tag!r}", robot, settings)
    parts = {part: robot.get_section(part) for part in ("video", "state", "action")}
    keys = {part: modality.get_texts("modality_keys", ()) for part, modality in parts.items()}
    if measured is None:
        action_keys, state_keys = config.action_keys or keys["action"], config.state_keys or keys["state"]
        measured = _build_statistics(statistics_file, statistics.get_record(tag), action_keys, state_keys, settings)
        files = {file.name: file.read_bytes() for file in (path, statistics_file, numbers)}
    else:
        files = {}
    edge, part = _read_scaling(path, settings)
    return Robot(
        tag=tag,
        row=rows.get_integer(tag, high=MAX_SIZE),
        statistics=measured,
        cameras=keys["video"],
        files=files,
        actions=len(_read_indices(parts["action"])) or None,
        pixels=edge,
        crop=part,
        formal=settings.get_boolean("formalize_language", True),
    )


def _read_scaling(path: Path, settings: Record) -> tuple[int, float]:
    """The side that images are scaled to, and the part of it that is seen. Null stands for the older settings, which
    are two sizes. Raises CheckpointError."""
    older = {name: _read_side(settings, name) for name in ("image_target_size", "image_crop_size")}
    size, crop = older["image_target_size"], older["image_crop_size"]
    edge, part = size, crop / size if crop and size else None
    if settings.has_value("shortest_image_edge") or "shortest_image_edge" not in settings.data:
        edge = settings.get_integer("shortest_image_edge", 1, MAX_PIXELS, default=256)
    if settings.has_value("crop_fraction") or "crop_fraction" not in settings.data:
        part = settings.get_number("crop_fraction", above=0, high=1, default=0.95)
    if edge is None or part is None:
        raise CheckpointError(f"{path} does not say how images are scaled (shortest_image_edge, crop_fraction)")
    if part > 1:
        raise CheckpointError(f"{path}: 'image_crop_size' is larger than 'image_target_size'")
    return edge, part


def _read_side(settings: Record, key: str) -> int | None:
    if not settings.has_value(key):
        return None
    sides = settings.get_sizes(key, 1, MAX_PIXELS)
    if not sides:
        raise settings.build_error(key, "a height and a width")
    return sides[0]


def _read_indices(part: Record) -> tuple[int, ...]:
    """Return the offsets of frames or actions from the present one; empty where the file has none."""
    return part.get_sizes("delta_indices", -MAX_CHUNK, MAX_CHUNK) if part.has_value("delta_indices") else ()


def _build_statistics(
    path: Path, ranges: Record, action: Sequence[str], state: Sequence[str], settings: Record
) -> Statistics:
    """By these keys of one robot's ranges."""
    rules: dict[str, Any] = {"quantiles": settings.get_boolean("use_percentiles", False), "near": 1e-5}
    clip = settings.get_boolean("clip_outliers", True)
    return Statistics(
        action=read_scale(path, ranges.get_section("action"), action, "action", clip=True, **rules),
        state=read_scale(path, ranges.get_section("state"), state, "state", clip=clip, **rules) if state else None,
    )


def _check_supported(where: str, robot: Record, settings: Record) -> None:
    """What a robot's state, actions and images are that this plugin does not make."""
    for part, what in ONE.items():
        indices = _read_indices(robot.get_section(part)) or (0,)
        if indices != (0,):
            raise CheckpointError(f"{where}: it sees more than the last {what} (delta_indices {list(indices)})")
    for part in ("state", "action"):
        if robot.get_section(part).data.get("mean_std_embedding_keys"):
            raise CheckpointError(f"{where}: {part} keys scaled by mean and deviation are not supported")
    sines = robot.get_section("state").data.get("sin_cos_embedding_keys")
    if settings.data.get("apply_sincos_state_encoding") and sines:
        raise CheckpointError(f"{where}: angles as sines and cosines are not supported")
    action = robot.get_section("action")
    forms = action.data.get("action_configs") or ()
    if not isinstance(forms, list | tuple) or not all(form is None or isinstance(form, Mapping) for form in forms):
        raise action.build_error("action_configs", "a list of JSON objects")
    kinds = {str(form.get("rep", "")).rpartition(".")[2].lower() for form in forms if form}
    if settings.data.get("use_relative_action") and "relative" in kinds:
        raise CheckpointError(
            f"{where} gives actions relative to the state, which is not supported; use a checkpoint that was trained "
            "on absolute actions"
        )


def processor_of(
    robot: Robot, statistics: Statistics, cameras: Sequence[str], pixels: int, shape: Any
) -> dict[str, bytes]:
    """Return the files for one embodiment, whose state and action are one key each."""
    scales = {"state": statistics.state, "action": statistics.action}
    present = {name: scale for name, scale in scales.items() if scale is not None}
    last = {
        "delta_indices": [0],
        "sin_cos_embedding_keys": None,
        "mean_std_embedding_keys": None,
        "action_configs": None,
    }
    kinds: dict[str, Any] = {name: {**last, "modality_keys": [name]} for name in present}
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
        STATISTICS: as_json({robot.tag: {name: {name: _write_ranges(scale)} for name, scale in present.items()}}),
        ROWS: as_json({robot.tag: robot.row}),
    }


def _write_ranges(scale: FeatureScale) -> dict[str, list[float]]:
    """Return all six statistics that the original requires; with the settings above it reads one pair of them."""
    low, high = (list(values) for values in scale.values)
    middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    half = [(b - a) / 2 for a, b in zip(low, high, strict=True)]
    return {"min": low, "max": high, "mean": middle, "std": half, "q01": low, "q99": high}
