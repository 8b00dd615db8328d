"""A folder in lerobot's layout (read and written) or openpi's (read)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vla_rl.plugins.models.pi0.architecture import Sizes, read_shape, variants
from vla_rl.plugins.models.pi0.layout import open_names, public_name
from vla_rl.plugins.models.pi0.network import Pi0Module
from vla_rl.plugins.models.pi0.statistics import WANTED, read_config, read_statistics
from vla_rl.toolkit.models.checkpoints import read_file, read_json, resolve
from vla_rl.toolkit.models.flow_checkpoint import ARCHITECTURE, Checkpoint, open_folder, save_folder
from vla_rl.toolkit.models.lerobot import Statistics, model_config, write_processors

SLOTS = 3
"""Images that pi0 was trained with: base, left wrist, right wrist."""


def open_checkpoint(name: str, tokenizer: str | None, asset_id: str | None) -> Checkpoint:
    """Read what is light: sizes, statistics, tokenizer."""
    folder = resolve(name, WANTED)
    raw = read_config(folder)
    own = folder / ARCHITECTURE
    return open_folder(
        folder,
        raw if raw.get("type") == "pi0" else {},
        sizes=read_file(own, lambda path: Sizes(**read_json(path))) if own.is_file() else Sizes.of_variants(raw),
        shape=read_file(folder / "config.json", lambda _: read_shape(raw)),
        statistics=read_statistics(folder, raw, asset_id),
        tokenizer=tokenizer,
        slots=SLOTS,
        open_names=open_names,
    )


def save_checkpoint(module: Pi0Module, checkpoint: Checkpoint, cameras: tuple[str, ...], folder: Path) -> None:
    """Write the folder in lerobot's layout, adapters merged into the weights."""
    names, shape = variants(checkpoint.sizes), checkpoint.shape
    pixels = checkpoint.sizes.image_size
    own = {"type": "pi0", **names, **shape.written(), "image_resolution": [pixels, pixels]}
    save_folder(
        module,
        checkpoint,
        folder,
        raw=model_config(checkpoint.statistics, cameras, pixels, shape.horizon, **own),
        processors=partial(_processors, statistics=checkpoint.statistics),
        public_name=public_name,
        public_sizes=bool(names),
    )


def _processors(raw: Mapping[str, Any], statistics: Statistics) -> dict[str, bytes]:
    steps = ("pi0_new_line_processor",)
    return write_processors(raw, statistics, steps, "google/paligemma-3b-pt-224", normalise_first=False)
