"""Opens a folder in lerobot's or openpi's layout, and saves in lerobot's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve

from vla_rl.plugins.models.pi0.architecture import PiSizes, name_variants, read_shape
from vla_rl.plugins.models.pi0.layout import open_names, public_name
from vla_rl.plugins.models.pi0.network import Pi0Module
from vla_rl.plugins.models.pi0.statistics import (
    NEW_LINE_STEP,
    STATE_KIND,
    STATE_STEP,
    check_model_of,
    read_config,
    read_statistics,
)
from vla_rl.toolkit.models.checkpoints.files import read_sizes
from vla_rl.toolkit.models.checkpoints.lerobot import (
    PREPROCESSOR,
    Statistics,
    check_actions,
    model_config,
    write_processors,
)
from vla_rl.toolkit.models.flow.checkpoint import ARCHITECTURE, FlowCheckpoint, open_folder, save_folder

SLOTS = 3
"""Number of images in pi0's training: base, left wrist, right wrist."""
WITH_STATE = ("exact", "padded")
"""Kinds of pi0.5's prompt that hold the state."""


def open_checkpoint(
    folder: Path, model: str, tokenizer: str | None, asset_id: str | None, measured: Statistics | None
) -> FlowCheckpoint:
    """Open a folder and read what is small: sizes, statistics (unless the run has `measured` its data's), tokenizer."""
    raw = read_config(folder, model)
    architecture = folder / ARCHITECTURE
    check_actions(folder, raw.data)
    opened = open_folder(
        folder,
        raw.data if "type" in raw.data else {},
        sizes=read_sizes(architecture, PiSizes) if architecture.is_file() else PiSizes.from_variants(raw),
        shape=read_shape(raw, model),
        statistics=measured or read_statistics(folder, raw, asset_id, model),
        tokenizer=tokenizer,
        slots=SLOTS,
        open_names=open_names,
    )
    check_model_of(folder, model, opened.weights.shapes if opened.weights else ())
    return opened


def save_checkpoint(
    module: Pi0Module,
    checkpoint: FlowCheckpoint,
    cameras: tuple[str, ...],
    folder: Path,
    *,
    chunk: int,
    kind: str | None,
) -> None:
    """Write the folder in lerobot's layout, adapters merged into the weights.

    Args:
        chunk: actions of a denoised chunk that the policy executes.
        kind: form of the state in pi0.5's prompt.
    """
    names, shape = name_variants(checkpoint.sizes), checkpoint.shape
    pixels = checkpoint.sizes.image_size
    settings = {
        "type": "pi0" if kind is None else "pi05",
        **names,
        **shape.to_lerobot(),
        "image_resolution": [pixels, pixels],
    }
    kept = checkpoint.processors.get(PREPROCESSOR)
    if kept is not None and kind is not None and (STATE_STEP.encode() in kept) != (kind in WITH_STATE):
        # lerobot would make another prompt of the folder than the spec asked for
        checkpoint = evolve(checkpoint, raw={**shape.to_lerobot(), **checkpoint.raw}, processors={})
    save_folder(
        module,
        checkpoint,
        folder,
        raw=model_config(checkpoint.statistics, cameras, pixels, shape.horizon, **settings),
        processors=partial(_build_processors, statistics=checkpoint.statistics, kind=kind),
        public_name=public_name,
        public_sizes=bool(names),
        executed=chunk,
    )
    if kind is not None:
        (folder / STATE_KIND).write_text(json.dumps({"state_in_prompt": kind}) + "\n", encoding="utf-8")


def _build_processors(raw: Mapping[str, Any], statistics: Statistics, kind: str | None) -> dict[str, bytes]:
    state_in_prompt = kind in WITH_STATE
    steps = (STATE_STEP if state_in_prompt else NEW_LINE_STEP,)
    return write_processors(raw, statistics, steps, "google/paligemma-3b-pt-224", normalise_first=state_in_prompt)
