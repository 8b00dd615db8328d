"""A folder in NVIDIA's layout: what config.json and metadata.json say, and whether this model can take it. Light."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.errors import CheckpointError, did_you_mean
from vla_rl.core.types import Context
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.toolkit.models.checkpoints import read_json
from vla_rl.toolkit.models.fitting import check_folder, known_action_dim
from vla_rl.toolkit.models.lerobot import Scale, Statistics

METADATA = "experiment_cfg/metadata.json"
WANTED = ("*.json", "*.safetensors")
"""Files of a hub repository that are read."""
MODEL_TYPE = "gr00t_n1_5"
OTHERS = {
    r"n1[d_.]*6": "N1.6, whose vision-language model is another, with code of its own; only a demo is public",
    r"n1[d_.]*7": "N1.7, whose inputs (Qwen3-VL's image grid, relative actions, percentiles) are not built here",
    r"groot": "lerobot's, which names tensors otherwise; take the folder in NVIDIA's layout that it was made from",
}
"""By what config.json calls them: why they are refused."""
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
"""Embodiment -> its row of the layers on state and actions: NVIDIA's, and RLinf's for simulators."""
HEAD = "action_head_cfg"
FIXED: dict[str, Any] = {
    "backbone_cfg.project_to_dim": None,
    f"{HEAD}.use_vlln": True,
    f"{HEAD}.add_pos_embed": True,
    f"{HEAD}.num_timestep_buckets": 1000,
    f"{HEAD}.max_num_embodiments": 32,
    f"{HEAD}.diffusion_model_cfg.num_attention_heads": 32,
    f"{HEAD}.diffusion_model_cfg.norm_type": "ada_norm",
    f"{HEAD}.diffusion_model_cfg.interleave_self_attention": True,
    f"{HEAD}.diffusion_model_cfg.positional_embeddings": None,
    f"{HEAD}.vl_self_attention_cfg.num_attention_heads": 32,
    f"{HEAD}.vl_self_attention_cfg.positional_embeddings": None,
}
"""Of config.json: what is not built otherwise."""


@frozen(kw_only=True)
class Sizes:
    """The towers and the head; the defaults are the public model's, of which config.json tells a part."""

    text_width: int = 2048
    text_mlp: int = 6144
    text_depth: int = 12
    """Layers of the language model, of Qwen3-1.7B's 28."""
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151680
    vision_width: int = 1152
    vision_mlp: int = 4304
    vision_depth: int = 27
    vision_heads: int = 16
    image_size: int = 224
    patch_size: int = 14
    mixer_depth: int = 4
    """Blocks that refine the language model's output."""
    mixer_heads: int = 32
    dit_depth: int = 16
    """Blocks of the diffusion transformer."""
    dit_heads: int = 32
    dit_head_dim: int = 48
    hidden: int = 1024
    """Inside the layers on state and actions."""
    output: int = 1024
    """Of the diffusion transformer."""
    future_tokens: int = 32
    positions: int = 1024
    embodiments: int = 32

    @property
    def width(self) -> int:
        """Of the diffusion transformer's tokens."""
        return self.dit_heads * self.dit_head_dim

    @property
    def patches(self) -> int:
        """Tokens of an image."""
        return (self.image_size // self.patch_size) ** 2


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises CheckpointError for another model, and for what is not supported."""
    path = folder / "config.json"
    raw = read_json(path)
    kind = str(raw.get("model_type", raw.get("type")))
    if kind != MODEL_TYPE:
        why = next((text for pattern, text in OTHERS.items() if re.search(pattern, kind.lower())), None)
        raise CheckpointError(
            f"{path} describes a model of type {kind!r}{f': {why}' if why else ''}; gr00t reads N1.5 in NVIDIA's "
            f"layout (`model_type: {MODEL_TYPE}`)"
        )
    if HEAD not in raw:
        raise CheckpointError(f"{path} has no {HEAD}: it is not that of a whole checkpoint of GR00T N1.5")
    for name, value in FIXED.items():
        *sections, key = name.split(".")
        given = reduce(lambda part, section: part.get(section, {}), sections, raw).get(key, value)
        if given != value:
            raise CheckpointError(f"{path}: {name} {given!r} is not supported, {value!r} is")
    return raw


def horizon(raw: Mapping[str, Any]) -> int:
    """H, actions in a denoised chunk."""
    return int(raw[HEAD].get("action_horizon", 16))


@frozen(kw_only=True)
class Robot:
    """One embodiment's entry of metadata.json."""

    tag: str
    statistics: Statistics
    cameras: tuple[str, ...]

    @property
    def row(self) -> int:
        return ROWS[self.tag]


def read_robot(folder: Path, config: GrootConfig) -> Robot:
    """Raises CheckpointError for one that is not in the file, or that has no layers in this model."""
    path, asked = folder / METADATA, config.embodiment
    entries = read_json(path)
    if asked is None and len(entries) != 1:
        raise CheckpointError(f"{path} has {len(entries)} embodiments; set model.embodiment: {', '.join(entries)}")
    tag = next(iter(entries)) if asked is None else asked
    if tag not in entries:
        raise CheckpointError(
            f"no embodiment {tag!r} in {path}; there are: {', '.join(entries)}{did_you_mean(tag, entries)}"
        )
    if tag not in ROWS:
        raise CheckpointError(
            f"{path}: which of the model's layers embodiment {tag!r} has is not known; it is of: {', '.join(ROWS)}"
        )
    statistics, modalities = (entries[tag].get(name, {}) for name in ("statistics", "modalities"))
    return Robot(
        tag=tag,
        statistics=Statistics(
            action=_scale(path, statistics.get("action", {}), config.action_keys, "action"),
            state=_scale(path, statistics["state"], config.state_keys, "state") if statistics.get("state") else None,
        ),
        cameras=tuple(modalities.get("video", {})),
    )


def _scale(path: Path, entries: Mapping[str, Any], asked: Sequence[str] | None, part: str) -> Scale:
    """Min-max of each key, one behind the other."""
    keys = tuple(entries) if asked is None else asked
    for key in keys:
        if key not in entries:
            raise CheckpointError(
                f"{path} has no {part} key {key!r}; it has: {', '.join(entries)}{did_you_mean(key, entries)}"
            )
        if not {"min", "max"} <= set(entries[key]):
            raise CheckpointError(f"{path} has no min and max of {part} key {key!r}")
    if not keys:
        raise CheckpointError(f"{path} has no statistics of the {part} to scale with")
    values = tuple(tuple(float(x) for key in keys for x in entries[key][end]) for end in ("min", "max"))
    return Scale(mode="MIN_MAX", values=values, dim=len(values[0]))


def metadata_of(tag: str, statistics: Statistics, cameras: Sequence[str], pixels: int) -> bytes:
    """metadata.json with one embodiment, whose state and action are one key each."""
    scales = {"state": statistics.state, "action": statistics.action}
    there = {name: scale for name, scale in scales.items() if scale is not None}
    own = {name: {name: dict(zip(("min", "max"), scale.values, strict=True))} for name, scale in there.items()}
    kinds: dict[str, Any] = {
        name: {name: {"absolute": True, "rotation_type": None, "shape": [scale.dim], "continuous": True}}
        for name, scale in there.items()
    }
    kinds["video"] = {name: {"resolution": [pixels, pixels], "channels": 3, "fps": 10.0} for name in cameras}
    content = {tag: {"statistics": own, "modalities": kinds, "embodiment_tag": tag}}
    return (json.dumps(content, indent=2) + "\n").encode()


def check(config: GrootConfig, context: Context) -> None:
    """For `Plugin.check`: the folder is complete and of this model, and holds chunks as long as the spec's."""

    def read(folder: Path) -> int:
        raw = read_config(folder)
        read_robot(folder, config)
        return horizon(raw)

    check_folder(config, context, read)


def action_dim(config: GrootConfig) -> int | None:
    """Numbers of an action as the checkpoint's statistics have it, where that is known (`known_action_dim`)."""
    return known_action_dim(config.checkpoint, lambda folder: read_robot(folder, config).statistics.action.dim, WANTED)
