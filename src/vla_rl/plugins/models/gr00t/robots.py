"""One robot ("embodiment") of a checkpoint: scaling of its state and actions, its cameras, and its index in the head's
embodiment-specific layers. Light to import."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.errors import CheckpointError, did_you_mean
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.toolkit.json_files import Record, encode_json
from vla_rl.toolkit.models.checkpoints.files import read_keys
from vla_rl.toolkit.models.checkpoints.lerobot import MODES, FeatureScale, Statistics, check_scale

logger = logging.getLogger(__name__)
METADATA = "experiment_cfg/metadata.json"
NEW = "new_embodiment"
"""Embodiment whose layers NVIDIA's own fine-tuning uses for a robot that the checkpoint does not know."""
ROWS = {
    "libero_panda": 2,
    "oxe_droid": 17,
    "gr1": 24,
    "agibot_genie1": 26,
    "maniskill_widowx": 30,
    "new_embodiment": 31,
    "libero_franka": 31,
    "isaaclab_franka": 31,
}
"""N1.5: embodiment -> its index in the layers on state and actions; NVIDIA's, and RLinf's for simulators."""


@frozen(kw_only=True)
class Robot:
    """Properties of one embodiment, read from a folder."""

    tag: str
    row: int
    statistics: Statistics
    cameras: tuple[str, ...]
    files: Mapping[str, bytes]
    """Files that describe the embodiment, kept unchanged."""
    actions: int | None = None
    """Number of actions of a denoised chunk that the embodiment was trained on; None: all."""
    pixels: int | None = None
    """Side of its images in pixels; None: the network's."""
    crop: float = 0.95
    """Share of a frame's side that the centre crop keeps."""
    formal: bool = False
    """Whether instructions are lower-cased and stripped of punctuation."""


def choose_embodiment(path: Path, entries: Iterable[str], requested: str | None) -> str:
    """Return the requested embodiment, or the only one. Raise CheckpointError if that cannot be chosen."""
    names = tuple(entries)
    if requested is None and len(names) != 1:
        raise CheckpointError(f"{path} has {len(names)} embodiments; set model.embodiment: {', '.join(names)}")
    tag = names[0] if requested is None else requested
    if tag not in names:
        raise CheckpointError(
            f"no embodiment {tag!r} in {path}; there are: {', '.join(names)}{did_you_mean(tag, names)}"
        )
    return tag


def choose_new_embodiment(path: Path, entries: Iterable[str], requested: str | None) -> str:
    """Return the embodiment of a robot whose statistics come from the data: the requested one, the only one in the
    file, or else `new_embodiment`."""
    names = tuple(entries)
    tag = requested or (names[0] if len(names) == 1 else NEW)
    if requested is None and tag == NEW:
        logger.warning(
            "%s has %d embodiments and model.embodiment names none: the data's robot gets the layers of %s",
            path, len(names), NEW,
        )  # fmt: skip
    return tag


def read_scale(
    path: Path,
    entries: Record,
    keys: Sequence[str],
    part: str,
    *,
    quantiles: bool = False,
    clip: bool = False,
    near: float = 0.0,
) -> FeatureScale:
    """Return the ranges of these keys, concatenated. Raise CheckpointError for a key without a range.

    Args:
        near: relative distance below which the ends of a range count as equal.
    """
    mode = "QUANTILES" if quantiles else "MIN_MAX"
    ends = MODES[mode]
    low: list[float] = []
    high: list[float] = []
    for key in keys:
        if key not in entries.data:
            available = ", ".join(entries.data)
            suggestion = did_you_mean(key, entries.data)
            raise CheckpointError(f"{path} has no {part} key {key!r}; it has: {available}{suggestion}")
        entry = entries.get_record(key)
        if not set(ends) <= set(entry.data):
            raise CheckpointError(f"{path} has no {' and '.join(ends)} of {part} key {key!r}")
        bounds = {end: entry.get_numbers(end) for end in ends}
        check_scale(entry.source, mode, bounds)
        for values, end in zip((low, high), ends, strict=True):
            values.extend(bounds[end])
    if not keys:
        raise CheckpointError(f"{path} has no statistics of the {part} to scale with")
    high = [a if isclose(a, b, rel_tol=near, abs_tol=near / 1000) else b for a, b in zip(low, high, strict=True)]
    return FeatureScale(mode=mode, values=(tuple(low), tuple(high)), dim=len(low), flat=True, clip=clip)


def read_metadata(folder: Path, config: GrootConfig, measured: Statistics | None = None) -> Robot:
    """Return N1.5's robot. Raise CheckpointError for one that is not in the file (unless the run has `measured` its
    data's statistics), or that has no layers in this model."""
    path = folder / METADATA
    empty = Record(source=str(path), data={}, error=CheckpointError)
    entries = read_keys(path) if measured is None or path.is_file() else empty
    tag = (choose_embodiment if measured is None else choose_new_embodiment)(path, entries.data, config.embodiment)
    if tag not in ROWS:
        raise CheckpointError(
            f"{path}: which of the model's layers embodiment {tag!r} has is not known; it is of: {', '.join(ROWS)}"
        )
    entry = entries.get_record(tag, {})
    cameras = tuple(entry.get_record("modalities", {}).get_record("video", {}).data)
    if measured is not None:
        return Robot(tag=tag, row=ROWS[tag], statistics=measured, cameras=cameras, files={})
    statistics = entry.get_record("statistics", {})
    action, state = (statistics.get_section(part) for part in ("action", "state"))
    return Robot(
        tag=tag,
        row=ROWS[tag],
        statistics=Statistics(
            action=read_scale(path, action, config.action_keys or tuple(action.data), "action"),
            state=read_scale(path, state, config.state_keys or tuple(state.data), "state") if state.data else None,
        ),
        cameras=cameras,
        files={METADATA: path.read_bytes()},
    )


def metadata_of(tag: str, statistics: Statistics, cameras: Sequence[str], pixels: int) -> dict[str, bytes]:
    """Return N1.5's metadata file for one embodiment, whose state and action are one key each."""
    scales = {"state": statistics.state, "action": statistics.action}
    present = {name: scale for name, scale in scales.items() if scale is not None}
    ranges = {name: {name: dict(zip(("min", "max"), scale.values, strict=True))} for name, scale in present.items()}
    kinds: dict[str, Any] = {
        name: {name: {"absolute": True, "rotation_type": None, "shape": [scale.dim], "continuous": True}}
        for name, scale in present.items()
    }
    kinds["video"] = {name: {"resolution": [pixels, pixels], "channels": 3, "fps": 10.0} for name in cameras}
    return {METADATA: encode_json({tag: {"statistics": ranges, "modalities": kinds, "embodiment_tag": tag}})}
