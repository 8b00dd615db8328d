"""Locates a checkpoint: in the plugin's folder, a given folder, or the Hugging Face hub's cache. Light to import."""

from __future__ import annotations

from pathlib import Path

from vla_rl.toolkit.models.checkpoints import files

BUILTIN = Path(__file__).parent / "checkpoints"
SENTENCEPIECE, ADAPTER_CONFIG = "tokenizer.model", "adapter_config.json"
WANTED = ("*.json", "*.safetensors", "*--*_checkpoint.pt", SENTENCEPIECE)
"""Files of a hub repository that are read; its Python code is not fetched, and never run."""


def resolve_checkpoint(name: str) -> Path:
    """Return the checkpoint's folder; see `checkpoints.resolve_checkpoint`."""
    return files.resolve_checkpoint(name, WANTED, BUILTIN)
