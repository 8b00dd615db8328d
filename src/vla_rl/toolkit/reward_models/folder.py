"""The folder of a success classifier: what `config.json` says about it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.paths import check_folder, explain_path_errors
from vla_rl.toolkit.json_files import read_record

KIND = "success_classifier"
WHAT = "the classifier's folder"
"""Name of the folder in messages about paths."""
VERSION = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SMALLEST_IMAGE = 16


@frozen(kw_only=True)
class ClassifierShape:
    """What a classifier looks at."""

    cameras: tuple[str, ...]
    instructions: tuple[str, ...]
    """Instructions of the recordings; the classifier judges no others."""
    image_size: int = 64
    """Side to which images are scaled, in pixels."""
    fitted: Mapping[str, Any] = field(factory=dict, eq=False)
    """How it was fitted, and what it reached on held-out episodes; for readers of `config.json`."""


def check_new_folder(folder: Path) -> None:
    """Raise UserError unless a classifier can be written to this folder; tested by trying."""
    with explain_path_errors(WHAT, folder):
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{folder} exists and is not empty; give the name of a new folder")
    check_folder(WHAT, folder)


def read_shape(folder: Path) -> ClassifierShape:
    """Read what a classifier's folder says about it, without its weights. Raises UserError for another folder."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} has no {CONFIG}; write a classifier with `vla-rl fit-rewards DATA --to {folder}`")
    record = read_record(folder / CONFIG)
    if record.get_text("kind", "") != KIND:
        raise record.build_error("kind", repr(KIND))
    record.get_integer("version", VERSION, VERSION)
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} has no {WEIGHTS}, so it is incomplete; fit the classifier again")
    return ClassifierShape(
        cameras=record.get_texts("cameras"),
        instructions=record.get_texts("instructions"),
        image_size=record.get_integer("image_size", SMALLEST_IMAGE, 1024),
        fitted=record.get_record("fitted", {}).data,
    )
