"""Locates a checkpoint: in the plugin's folder, a given folder, or the Hugging Face hub's cache. Light to import."""

from __future__ import annotations

from pathlib import Path

from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints import files

BUILTIN = Path(__file__).parent / "checkpoints"
SENTENCEPIECE, ADAPTER_CONFIG = "tokenizer.model", "adapter_config.json"
WANTED = ("*.json", "*.safetensors", "*--*_checkpoint.pt", SENTENCEPIECE)
"""Files of a hub repository that are read; its Python code is not fetched, and never run."""


STATISTICS = "dataset_statistics.json"


def read_known(folder: Path, raw: Record) -> Record:
    """Statistics of all data sets, by name. Raises CheckpointError.

    Args:
        raw: config.json, which holds them where they have no file.
    """
    file = folder / STATISTICS
    return files.read_keys(file) if file.is_file() else raw.get_section("norm_stats")


def resolve_checkpoint(name: str) -> Path:
    """Return the checkpoint's folder; see `checkpoints.resolve_checkpoint`."""
    return files.resolve_checkpoint(name, WANTED, BUILTIN)
