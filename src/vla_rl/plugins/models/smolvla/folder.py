"""Reads config.json of a folder in lerobot's layout, and whether this plugin supports it. Light to import."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import CheckpointError
from vla_rl.core.types import EnvInfo
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.toolkit.json_files import Record
from vla_rl.toolkit.models.checkpoints.files import MAX_LAYERS, check_even, check_multiples, read_keys
from vla_rl.toolkit.models.checkpoints.fitting import check_folder, data_references, known_number
from vla_rl.toolkit.models.checkpoints.lerobot import (
    check_actions,
    read_executed,
    read_horizon,
    read_references,
    read_statistics,
)
from vla_rl.toolkit.relative_actions import References

PUBLIC = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
"""Vision-language model whose sizes are known here: config.json names it without its sizes."""
FIXED = {
    "attention_mode": "cross_attn",
    "add_image_special_tokens": False,
    "adapt_to_pi_aloha": False,
}
"""Keys of lerobot's config.json with the only value that is supported."""


@frozen(kw_only=True)
class SmolVLASizes:
    """Sizes of the towers. Defaults are the public model's."""

    text_width: int = 960
    text_mlp: int = 2560
    expert_width: int = 720
    expert_mlp: int = 2048
    depth: int = 16
    """Layers of the language model (half of SmolVLM2's) and of the expert; each reads the same layer of the other."""
    alternate: int = 2
    """Period of self-attention: the expert's tokens see each other in each `alternate`-th layer, else the prefix."""
    heads: int = 15
    kv_heads: int = 5
    head_dim: int = 64
    vocab: int = 49280
    vision_width: int = 768
    vision_mlp: int = 3072
    vision_depth: int = 12
    vision_heads: int = 12
    image_size: int = 512
    patch_size: int = 16
    shuffle: int = 4
    """Patches in each direction that are merged into one token."""

    def __attrs_post_init__(self) -> None:
        check_multiples(self, vision_width="vision_heads", heads="kv_heads", image_size="patch_size")
        check_multiples(self, text_width="heads", expert_width="heads")
        check_even(self, "head_dim", "expert_width")
        side = self.image_size // self.patch_size
        if self.shuffle < 1 or side % self.shuffle:
            raise ValueError(f"'shuffle' is {self.shuffle}, a divisor of the {side} patches of a side is expected")

    @classmethod
    def of_config(cls, raw: Record) -> SmolVLASizes:
        """From lerobot's config.json. Raises CheckpointError for a vision-language model that is not the public one."""
        public, name = cls(), raw.get_text("vlm_model_name", PUBLIC)
        if name != PUBLIC:
            raise CheckpointError(f"SmolVLA on {name!r} is not supported; on {PUBLIC!r} it is")
        depth = raw.get_integer("num_vlm_layers", 1, MAX_LAYERS, default=public.depth)
        expert = raw.get_integer("num_expert_layers", -1, MAX_LAYERS, default=-1)
        if expert not in {-1, 0, depth}:
            raise CheckpointError(
                f"an expert of {expert} layers for a language model of {depth} is not supported; they must be equal"
            )
        width = int(public.text_width * raw.get_number("expert_width_multiplier", 0.1, high=100, default=0.75))
        alternate = raw.get_integer("self_attn_every_n_layers", 1, MAX_LAYERS, default=public.alternate)
        try:
            return cls(expert_width=width, expert_mlp=mlp_width(width), depth=depth, alternate=alternate)
        except ValueError as exc:
            raise raw.error(f"{raw.source}: 'expert_width_multiplier' does not fit: {exc}") from exc


def mlp_width(width: int) -> int:
    """Return the MLP width of an expert's layer: 8/3 of its width, rounded up to a multiple of 256."""
    return -(-4 * int(2 * width / 3) // 256) * 256


def read_config(folder: Path) -> Record:
    """config.json. Raises CheckpointError for another model, and for what is not supported."""
    record = read_keys(folder / "config.json")
    raw = record.data
    if raw.get("type") != "smolvla":
        kind = raw.get("type", raw.get("model_type"))
        raise CheckpointError(
            f"{folder / 'config.json'} describes a model of type {kind!r}; smolvla reads lerobot's layout "
            "(`type: smolvla`)"
        )
    for key, value in FIXED.items():
        if raw.get(key, value) != value:
            raise CheckpointError(f"{folder / 'config.json'}: {key} {raw[key]!r} is not supported, {value!r} is")
    return record


def check_checkpoint(config: SmolVLAConfig, context: CheckContext) -> None:
    """Check that the folder is complete, of this model, and has chunks as long as the spec's."""

    def read_chunk_horizon(folder: Path) -> int:
        raw = read_config(folder)
        if context.scaling is None:
            read_statistics(folder, raw.data)
        else:
            check_actions(folder, raw.data)
        return read_horizon(raw)

    check_folder(config, context, read_chunk_horizon)


def relative_actions(config: SmolVLAConfig, env: EnvInfo) -> References:
    """Return what actions are relative to (`ModelPlugin.relative_actions`). Raise CheckpointError or MismatchError."""
    return data_references(
        config, env, lambda folder: read_references(folder, read_config(folder).data, env.action_dim)
    )


def action_dim(config: SmolVLAConfig) -> int | None:
    """Return the number of action dimensions in the checkpoint's statistics, where it is known (`known_number`)."""
    return known_number(config.checkpoint, lambda folder: read_statistics(folder, read_config(folder).data).action.dim)


def default_chunk(config: SmolVLAConfig) -> int | None:
    """Return `n_action_steps` of the checkpoint's config.json, where it is known (`known_number`)."""
    return known_number(config.checkpoint, lambda folder: read_executed(read_config(folder)))
