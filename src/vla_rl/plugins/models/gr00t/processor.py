"""Robots of N1.7: processor_config.json, statistics.json and embodiment_id.json, as NVIDIA's processor saves them.
Light to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve

from vla_rl.core.errors import CheckpointError
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.gr00t.robots import Robot, choose_embodiment, choose_new_embodiment, read_scale
from vla_rl.toolkit.json_files import Record, encode_json
from vla_rl.toolkit.models.checkpoints.files import MAX_CHUNK, MAX_PIXELS, MAX_SIZE, read_keys
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale, Statistics, check_scale

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
NEAR = 1e-5
"""Relative distance below which the ends of a range count as equal."""
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
    relative = _read_relative(f"{path}, embodiment {tag!r}", robot, settings)
    parts = {part: robot.get_section(part) for part in ("video", "state", "action")}
    keys = {part: modality.get_texts("modality_keys", ()) for part, modality in parts.items()}
    if measured is None:
        action_keys, state_keys = config.action_keys or keys["action"], config.state_keys or keys["state"]
        ranges = statistics.get_record(tag)
        measured = _build_statistics(statistics_file, ranges, action_keys, state_keys, settings)
        measured = _scale_differences(statistics_file, ranges, action_keys, state_keys, relative, measured)
        files = {file.name: file.read_bytes() for file in (path, statistics_file, numbers)}
    else:
        if relative and config.actions is None:
            raise CheckpointError(
                f"{path}, embodiment {tag!r}: the actions {', '.join(relative)} are relative to the state, and with "
                f"imitation.statistics: data the data's robot may have others; say model.actions: "
                f"{{relative_to: state, dimensions: [...]}}, or model.actions: absolute"
            )
        files = {}
    edge, part = _read_scaling(path, settings)
    return Robot(
        tag=tag,
        row=rows.get_integer(tag, high=MAX_SIZE),
        statistics=measured,
        cameras=keys["video"],
        files=files,
        actions=_count_actions(parts["action"], measured.action),
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


def _count_actions(action: Record, scale: FeatureScale) -> int | None:
    """Return how many actions of a chunk the robot was trained on; None: all."""
    counts = [count for count in (len(_read_indices(action)), len(scale.by_step[0]) if scale.by_step else 0) if count]
    return min(counts, default=None)


def _read_indices(part: Record) -> tuple[int, ...]:
    """Return the offsets of frames or actions from the present one; empty where the file has none."""
    return part.get_sizes("delta_indices", -MAX_CHUNK, MAX_CHUNK) if part.has_value("delta_indices") else ()


def _build_statistics(
    path: Path, ranges: Record, action: Sequence[str], state: Sequence[str], settings: Record
) -> Statistics:
    """By these keys of one robot's ranges."""
    rules: dict[str, Any] = {"quantiles": settings.get_boolean("use_percentiles", False), "near": NEAR}
    clip = settings.get_boolean("clip_outliers", True)
    return Statistics(
        action=read_scale(path, ranges.get_section("action"), action, "action", clip=True, **rules),
        state=read_scale(path, ranges.get_section("state"), state, "state", clip=clip, **rules) if state else None,
    )


def _scale_differences(
    path: Path,
    ranges: Record,
    action: Sequence[str],
    state: Sequence[str],
    relative: Mapping[str, str],
    scales: Statistics,
) -> Statistics:
    """Return the statistics with those of relative actions, which have a range for each step of a chunk.

    Args:
        ranges: those of one robot.
        relative: action's key -> key of the state that it is relative to.
    """
    if not any(key in relative for key in action):
        return scales
    widths = {
        part: {key: len(ranges.get_record(part).get_record(key).get_numbers("min")) for key in keys}
        for part, keys in (("action", action), ("state", state))
    }
    starts = dict(zip(state, accumulate(widths["state"].values(), initial=0), strict=False))
    references: list[int | None] = []
    rows: dict[str, list[list[tuple[float, ...]]]] = {"min": [], "max": []}
    for key in action:
        width, reference = widths["action"][key], relative.get(key)
        if reference is None:
            begin = len(references)
            for values, end in zip(scales.action.values, ("min", "max"), strict=True):
                rows[end].append([values[begin : begin + width]])
            references += [None] * width
            continue
        if widths["state"].get(reference) != width:
            available = ", ".join(f"{name} ({count})" for name, count in widths["state"].items()) or "none"
            raise CheckpointError(
                f"{path}: the {width} numbers of action {key!r} are relative to the state {reference!r}, which the "
                f"policy does not see with as many numbers; it sees: {available}; choose model.state_keys with it"
            )
        for end, parts in rows.items():
            parts.append(_read_steps(ranges.get_section("relative_action").get_record(key), end, width))
        references += range(starts[reference], starts[reference] + width)
    steps = min(len(part) for part, key in zip(rows["min"], action, strict=True) if key in relative)
    low, high = (
        tuple(sum((part[step if len(part) > 1 else 0] for part in rows[end]), ()) for step in range(steps))
        for end in ("min", "max")
    )
    high = tuple(
        tuple(a if isclose(a, b, rel_tol=NEAR, abs_tol=NEAR / 1000) else b for a, b in zip(*pair, strict=True))
        for pair in zip(low, high, strict=True)
    )
    for one, other in zip(low, high, strict=True):
        check_scale(f"{path}: 'relative_action'", "MIN_MAX", {"min": one, "max": other})
    widest = tuple(map(min, zip(*low, strict=True))), tuple(map(max, zip(*high, strict=True)))
    return evolve(
        scales, action=evolve(scales.action, values=widest, by_step=(low, high)), references=tuple(references)
    )


def _read_steps(entry: Record, end: str, width: int) -> list[tuple[float, ...]]:
    """Return the numbers of each step of a chunk. Raise CheckpointError unless there are `width` of each."""
    rows = entry.data.get(end)
    if not isinstance(rows, list) or not rows:
        raise entry.build_error(end, f"a list of {width} numbers for each step of a chunk")
    steps = Record(
        source=f"{entry.source}, {end!r}", data={str(i): row for i, row in enumerate(rows)}, error=CheckpointError
    )
    numbers = [steps.get_numbers(str(i)) for i in range(len(rows))]
    if any(len(row) != width for row in numbers):
        raise entry.build_error(end, f"a list of {width} numbers for each step of a chunk")
    return numbers


def _read_relative(where: str, robot: Record, settings: Record) -> dict[str, str]:
    """Return the keys of actions that are relative to the state -> the key of the state. Raise CheckpointError for
    poses of an end effector, whose differences are in its own axes."""
    action = robot.get_section("action")
    forms = action.data.get("action_configs") or ()
    if not isinstance(forms, list | tuple) or not all(form is None or isinstance(form, Mapping) for form in forms):
        raise action.build_error("action_configs", "a list of JSON objects")
    if not settings.get_boolean("use_relative_action", False):
        return {}
    relative = {}
    for key, form in zip(action.get_texts("modality_keys", ()), forms, strict=False):
        if form is None or _last_word(form.get("rep")) != "relative":
            continue
        if _last_word(form.get("type")) == "eef":
            raise CheckpointError(
                f"{where}: action {key!r} is a pose of an end effector relative to its own axes, which is not "
                f"supported; joints relative to the state are: choose a checkpoint with those, or model.action_keys "
                f"without {key!r}"
            )
        reference = form.get("state_key") or key
        if not isinstance(reference, str):
            raise action.build_error("action_configs", "JSON objects whose 'state_key' is a text")
        relative[key] = reference
    return relative


def _last_word(value: Any) -> str:
    """Return the name of an enumeration's value (`RELATIVE`, `ActionRepresentation.RELATIVE`) in lower case."""
    return str(value or "").rpartition(".")[2].lower()


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


def processor_of(
    robot: Robot, statistics: Statistics, cameras: Sequence[str], pixels: int, shape: Any
) -> dict[str, bytes]:
    """Return the files for one embodiment, whose state and action are one key each."""
    references = statistics.references or ()
    numbers = _split_numbers if references else _keep_together
    parts = {"state": statistics.state, "action": statistics.action}
    scales = {name: numbers(name, scale) for name, scale in parts.items() if scale is not None}
    last = {
        "delta_indices": [0],
        "sin_cos_embedding_keys": None,
        "mean_std_embedding_keys": None,
        "action_configs": None,
    }
    kinds: dict[str, Any] = {name: {**last, "modality_keys": list(keys)} for name, keys in scales.items()}
    kinds["action"]["delta_indices"] = list(range(robot.actions or shape.horizon))
    if references:
        kinds["action"]["action_configs"] = [_describe_action(place) for place in references]
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
        "use_relative_action": bool(references),
        "exclude_state": False,
    }
    ranges = {name: {key: _write_ranges(*scale.values) for key, scale in keys.items()} for name, keys in scales.items()}
    differences = {
        key: _write_ranges(*(scale.by_step or ((end,) * shape.horizon for end in scale.values)))
        for (key, scale), place in zip(scales["action"].items(), references, strict=bool(references))
        if place is not None
    }
    return {
        PROCESSOR: encode_json({"processor_class": "Gr00tN1d7Processor", SETTINGS: settings}),
        STATISTICS: encode_json({robot.tag: {**ranges, **({"relative_action": differences} if references else {})}}),
        ROWS: encode_json({robot.tag: robot.row}),
    }


def _keep_together(part: str, scale: FeatureScale) -> dict[str, FeatureScale]:
    """Return the scale of all numbers under one key."""
    return {part: scale}


def _split_numbers(part: str, scale: FeatureScale) -> dict[str, FeatureScale]:
    """Return the scale of each number under a key for it: an action's key is relative to a key of the state, and may be
    relative to any number of it then."""
    return {
        f"{part}_{number}": evolve(
            scale,
            dim=1,
            values=tuple((end[number],) for end in scale.values),
            by_step=tuple(tuple((row[number],) for row in end) for end in scale.by_step),
        )
        for number in range(scale.dim)
    }


def _describe_action(place: int | None) -> dict[str, Any]:
    """Return the form of an action of one number, which is relative to the state's number at a place."""
    form = {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}
    return form if place is None else {**form, "rep": "RELATIVE", "state_key": f"state_{place}"}


def _write_ranges(low: Any, high: Any) -> dict[str, Any]:
    """Return all six statistics that the original requires; with the settings above it reads one pair of them. The ends
    are of all numbers, [D], or of each step, [H, D]."""
    ends = np.array(low, np.float64), np.array(high, np.float64)
    low, high = (end.tolist() for end in ends)
    middle, half = ((ends[0] + ends[1]) / 2).tolist(), ((ends[1] - ends[0]) / 2).tolist()
    return {"min": low, "max": high, "mean": middle, "std": half, "q01": low, "q99": high}
