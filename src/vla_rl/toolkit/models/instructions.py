"""Text that follows every instruction of a policy (`VLAModel.instruction_suffix`): appended, saved and read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import evolve

from vla_rl.core.errors import CheckpointError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.types import Observation
from vla_rl.toolkit.json_files import read_record
from vla_rl.toolkit.models.checkpoints.files import resolve_checkpoint

INSTRUCTION = "instruction.json"
"""File in addition to a model's own files; a model without a suffix has none."""


def with_suffix(obs: Observation, suffix: str) -> Observation:
    """Return the observation with the suffix after each instruction that does not end with it already."""
    if not suffix:
        return obs
    return evolve(obs, instructions=tuple(text.removesuffix(suffix) + suffix for text in obs.instructions))


@contextmanager
def without_suffix(model: VLAModel) -> Iterator[None]:
    """Context in which the model, not acting, gets instructions as they are: a trainer chooses each sample's text."""
    suffix = model.instruction_suffix
    model.instruction_suffix = ""
    try:
        yield
    finally:
        model.instruction_suffix = suffix


def save_suffix(model: VLAModel, folder: Path) -> None:
    """Write the model's suffix to the folder in which it was saved, if it has one."""
    if model.instruction_suffix:
        text = json.dumps({"suffix": model.instruction_suffix}, ensure_ascii=False)
        (folder / INSTRUCTION).write_text(f"{text}\n", encoding="utf-8")


def saved_suffix(checkpoint: Any) -> str:
    """Return the suffix that was saved with a model's checkpoint; "" without one.

    Args:
        checkpoint: a model's key of that name: a folder, a hub name in the cache, or what has no suffix.
    Raises CheckpointError for a file that cannot be read.
    """
    if not isinstance(checkpoint, str | Path):
        return ""
    try:
        folder = resolve_checkpoint(str(checkpoint), (INSTRUCTION,), download=False)
    except CheckpointError:  # no folder: `builtin:NAME`, or another meaning that a plugin gives to its key
        return ""
    file = folder / INSTRUCTION
    return read_record(file, CheckpointError).get_text("suffix") if file.is_file() else ""
