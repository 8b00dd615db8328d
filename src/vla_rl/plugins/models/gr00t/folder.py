"""Reads the small files of a folder in NVIDIA's layout: the generation of GR00T, its sizes, its robot, the length of
its chunks, and whether this plugin supports it. Light to import."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import CheckpointError
from vla_rl.core.paths import read_table
from vla_rl.core.types import EnvInfo
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.gr00t.processor import read_processor
from vla_rl.plugins.models.gr00t.robots import Robot, read_metadata
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints.files import MAX_CHUNK, MAX_DIM, MAX_SIZE, check_even, check_multiples, read_keys
from vla_rl.toolkit.models.checkpoints.fitting import check_folder, data_references, known_number
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale, Statistics
from vla_rl.toolkit.relative_actions import References

OTHERS = {
    r"n1[d_.]*6": "N1.6, which has another vision-language model with its own code; only a demo is public",
    r"groot": "lerobot's, which names tensors otherwise; take the folder in NVIDIA's layout that it was made from",
}
"""Pattern of `model_type` in config.json -> why such models are refused."""


@frozen(kw_only=True)
class GrootSizes:
    """Sizes of the towers and the head. Defaults are N1.5's public model's, since config.json gives only a part."""

    text_width: int = 2048
    text_mlp: int = 6144
    text_depth: int = 12
    """Layers of the language model, out of Qwen3-1.7B's 28."""
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
    """Transformer blocks that refine the language model's output."""
    mixer_heads: int = 32
    dit_depth: int = 16
    """Blocks of the diffusion transformer."""
    dit_heads: int = 32
    dit_head_dim: int = 48
    hidden: int = 1024
    """Hidden width of the MLPs on state and actions."""
    output: int = 1024
    """Output width of the diffusion transformer."""
    future_tokens: int = 32
    positions: int = 1024
    embodiments: int = 32

    def __attrs_post_init__(self) -> None:
        check_multiples(self, vision_width="vision_heads", heads="kv_heads", text_width="mixer_heads")
        check_multiples(self, image_size="patch_size")
        check_even(self, "head_dim", "dit_head_dim")
        if self.width > MAX_SIZE:
            raise ValueError(f"'dit_heads' times 'dit_head_dim' is {self.width}, at most {MAX_SIZE:,} are expected")

    @property
    def width(self) -> int:
        """Width of the diffusion transformer's tokens."""
        return self.dit_heads * self.dit_head_dim

    @property
    def side(self) -> int:
        """Tokens along the side of an image."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """Tokens of an image."""
        return self.side**2


@frozen(kw_only=True)
class QwenSizes(GrootSizes):
    """Sizes of N1.7, whose towers are Qwen3-VL-2B's (Cosmos-Reason2-2B)."""

    text_depth: int = 16
    vocab: int = 151936
    vision_width: int = 1024
    vision_mlp: int = 4096
    vision_depth: int = 24
    image_size: int = 256
    patch_size: int = 16
    dit_depth: int = 32
    future_tokens: int = 0
    vision_positions: int = 2304
    """Number of learnt position embeddings, on a square grid that is interpolated to an image's."""
    merge: int = 2
    """Patches along a side that are merged into one token."""
    deepstack: tuple[int, ...] = field(default=(5, 11, 17), converter=tuple)
    """Layers of the vision tower whose output is added after the first layers of the language model."""
    rope: tuple[int, ...] = field(default=(24, 20, 20), converter=tuple)
    """Number of rotary pairs that encode time, row and column."""
    text_every: int = 2
    """Period of text attention: one of this many cross-attention blocks attends to the prompt, others to the images."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.merge < 1 or self.image_size // self.patch_size % self.merge:
            raise ValueError(f"'merge' is {self.merge}, a divisor of the patches of a side is expected")
        if self.vision_width // self.vision_heads % 4:
            raise ValueError(f"'vision_heads' is {self.vision_heads}, heads of four numbers or a multiple are expected")
        if any(layer >= self.vision_depth for layer in self.deepstack):
            raise ValueError(f"'deepstack' is {list(self.deepstack)}, layers below {self.vision_depth} are expected")
        if len(self.rope) != 3 or 2 * sum(self.rope) != self.head_dim:
            raise ValueError(f"'rope' is {list(self.rope)}, three parts of {self.head_dim // 2} are expected")
        if isqrt(max(self.vision_positions, 0)) ** 2 != self.vision_positions:
            raise ValueError(f"'vision_positions' is {self.vision_positions}, a square is expected")

    @property
    def side(self) -> int:
        return self.image_size // (self.patch_size * self.merge)


@frozen(kw_only=True)
class Generation:
    """Generation of GR00T, identified by `model_type` in config.json."""

    name: str
    model_type: str
    sizes: type[GrootSizes]
    section: str | None
    """Section of config.json that describes the head; None: the top level."""
    shape: Mapping[str, tuple[str, int]]
    """Field of `FlowShape` -> its name in config.json, and the public model's value."""
    fixed: Mapping[str, Any]
    """Keys of config.json with the only value that is supported."""

    def shape_of(self, raw: Record) -> dict[str, int]:
        """Raises CheckpointError."""
        head = raw if self.section is None else raw.get_record(self.section)
        limits = {"horizon": MAX_CHUNK}
        return {
            name: head.get_integer(key, 1, limits.get(name, MAX_DIM), default=usual)
            for name, (key, usual) in self.shape.items()
        }

    def to_config(self, shape: Any) -> dict[str, Any]:
        """Return the config.json of a preset."""
        head = {key: getattr(shape, name) for name, (key, _) in self.shape.items()}
        top = {"model_type": self.model_type, "architectures": [self.model_type]}
        return {**top, **(head if self.section is None else {self.section: head})}


FACTS: Mapping[str, Any] = read_table(__file__, "generations.yaml")
"""Generation -> what differs between them."""
N1_5 = Generation(name="N1.5", sizes=GrootSizes, **FACTS["N1.5"]["config"])
N1_7 = Generation(name="N1.7", sizes=QwenSizes, **FACTS["N1.7"]["config"])
GENERATIONS = {generation.model_type: generation for generation in (N1_5, N1_7)}


def read_config(folder: Path) -> tuple[Record, Generation]:
    """config.json. Raises CheckpointError for another model, and for what is not supported."""
    path = folder / "config.json"
    record = read_keys(path)
    raw = record.data
    kind = str(raw.get("model_type", raw.get("type")))
    if kind not in GENERATIONS:
        why = next((text for pattern, text in OTHERS.items() if re.search(pattern, kind.lower())), None)
        supported = " and ".join(f"{one.name} (`model_type: {one.model_type}`)" for one in GENERATIONS.values())
        raise CheckpointError(
            f"{path} describes a model of type {kind!r}{f': {why}' if why else ''}; gr00t reads {supported} in "
            "NVIDIA's layout"
        )
    generation = GENERATIONS[kind]
    if generation.section is not None and generation.section not in raw:
        raise CheckpointError(
            f"{path} has no {generation.section}: it is not that of a whole checkpoint of GR00T {generation.name}"
        )
    for name, value in generation.fixed.items():
        *sections, key = name.split(".")
        part = record
        for section in sections:
            part = part.get_record(section) if part.has_value(section) else evolve(part, data={})
        recorded = part.data.get(key, value)
        if recorded != value or isinstance(recorded, bool) != isinstance(value, bool):
            raise CheckpointError(f"{path}: {name} {recorded!r} is not supported, {value!r} is")
    return record, generation


UNREAD = Statistics(action=FeatureScale(mode="IDENTITY", values=(), dim=0), state=None)
"""Placeholder for the data's statistics before they are read."""


def read_folder(
    folder: Path, config: GrootConfig, measured: Statistics | None = None
) -> tuple[Record, Generation, Robot]:
    """config.json and the robot that the spec asks for. Raises CheckpointError.

    Args:
        measured: statistics of the data that the run scales by; the folder then needs none of that robot.
    """
    raw, generation = read_config(folder)
    return raw, generation, (read_metadata if generation == N1_5 else read_processor)(folder, config, measured)


def longest_chunk(raw: Record, generation: Generation, robot: Robot) -> int:
    """Actions that can be executed of a denoised chunk."""
    return min(generation.shape_of(raw)["horizon"], robot.actions or 10**6)


def check_checkpoint(config: GrootConfig, context: CheckContext) -> None:
    """Check that the folder is complete, of this model, and has chunks as long as the spec's."""
    measured = None if context.scaling is None else UNREAD
    check_folder(config, context, lambda folder: longest_chunk(*read_folder(folder, config, measured)))


def relative_actions(config: GrootConfig, env: EnvInfo) -> References:
    """Return what actions are relative to (`ModelPlugin.relative_actions`). Raise CheckpointError or MismatchError."""

    def read_references(folder: Path) -> References | None:
        return read_folder(folder, config, UNREAD)[2].statistics.references

    return data_references(config, env, read_references)


def action_dim(config: GrootConfig) -> int | None:
    """Return the number of action dimensions in the checkpoint's statistics, where it is known (`known_number`)."""

    def read_action_dim(folder: Path) -> int:
        return read_folder(folder, config)[2].statistics.action.dim

    return known_number(config.checkpoint, read_action_dim)
