"""Folders of models that denoise action chunks: opened with statistics and tokenizer, written in lerobot's layout. In
addition to lerobot's files a folder may have ours: value_head.safetensors, noise_head.safetensors,
steering_head.safetensors, and architecture.json with the sizes of a network that is not one of the public ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen
from tokenizers import Tokenizer

from vla_rl.toolkit.json_files import Record, encode_json
from vla_rl.toolkit.models.adapter_files import save_apart
from vla_rl.toolkit.models.adapters import MergedState
from vla_rl.toolkit.models.checkpoints.files import (
    MAX_DIM,
    MAX_TOKENS,
    TOKENIZER,
    WEIGHTS,
    WeightFiles,
    find_tokenizer,
    find_weights,
    read_tokenizer,
    save_tensors,
)
from vla_rl.toolkit.models.checkpoints.lerobot import EXECUTED, IMAGES, LEROBOT, Statistics, read_horizon
from vla_rl.toolkit.models.flow.network import FlowModule
from vla_rl.toolkit.models.heads import NOISE_HEAD, STEERING_HEAD, VALUE_HEAD, save_head

ARCHITECTURE = "architecture.json"
PERIODS = (1e-6, 1e6)
"""Between which the network's clock is finite in float32."""


@frozen(kw_only=True)
class FlowShape:
    """Padded sizes of the network's inputs and outputs, and its time embedding."""

    horizon: int
    """H, actions in a denoised chunk."""
    action_dim: int = 32
    state_dim: int = 32
    min_period: float = 4e-3
    max_period: float = 4.0
    """Longest period of the sinusoids that embed the time; `min_period` is the shortest."""
    tokenizer_max_length: int = 48
    """Most tokens of an instruction; longer ones are cut off."""

    @classmethod
    def read_lerobot(cls, raw: Record, tokens: int = 48) -> FlowShape:
        """From lerobot's config.json. Raises CheckpointError.

        Args:
            tokens: of an instruction, where the file does not say.
        """
        shortest = raw.get_number("min_period", PERIODS[0], high=PERIODS[1], default=4e-3)
        return cls(
            horizon=read_horizon(raw),
            action_dim=raw.get_integer("max_action_dim", 1, MAX_DIM, default=32),
            state_dim=raw.get_integer("max_state_dim", 1, MAX_DIM, default=32),
            min_period=shortest,
            max_period=raw.get_number("max_period", shortest, high=PERIODS[1], default=4.0),
            tokenizer_max_length=raw.get_integer("tokenizer_max_length", 1, MAX_TOKENS, default=tokens),
        )

    def to_lerobot(self) -> dict[str, Any]:
        """Return the keys of config.json that `read_lerobot` reads, without the horizon."""
        return {
            "max_state_dim": self.state_dim,
            "max_action_dim": self.action_dim,
            "min_period": self.min_period,
            "max_period": self.max_period,
            "tokenizer_max_length": self.tokenizer_max_length,
        }


@frozen(kw_only=True)
class FlowCheckpoint:
    """An opened checkpoint folder, or a preset's replacement for it. Weight files are located and not yet read."""

    sizes: Any
    """Sizes of the network: an attrs class of its plugin."""
    shape: FlowShape
    statistics: Statistics
    tokenizer: Tokenizer
    raw: Mapping[str, Any]
    """Content of config.json in lerobot's layout."""
    slots: int
    """Number of images the network can take."""
    folder: Path | None = None
    weights: WeightFiles | None = None
    """Weight files by public names, without lerobot's prefix."""
    processors: Mapping[str, bytes] = attrs.field(factory=dict)
    """lerobot's files of pre- and post-processing, kept as they are."""

    @property
    def image_names(self) -> tuple[str, ...]:
        """Names of the images that the model was trained with, in order; empty if the folder does not say."""
        return trained_images(self.raw)


def trained_images(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the images in config.json of lerobot's layout, in order."""
    names = [name.removeprefix(IMAGES) for name in raw.get("input_features") or () if name.startswith(IMAGES)]
    return tuple(name for name in names if not name.startswith("empty_camera"))


def open_folder(
    folder: Path,
    raw: Mapping[str, Any],
    *,
    sizes: Any,
    shape: FlowShape,
    statistics: Statistics,
    tokenizer: str | None,
    slots: int,
    open_names: Callable[[Collection[str]], Mapping[str, str]],
) -> FlowCheckpoint:
    """Open a folder by its small files: the tokenizer, the headers of the weights, lerobot's files.

    Args:
        raw: config.json in lerobot's layout, empty if the folder has another.
        slots: number of images it can take at least.
    """
    return FlowCheckpoint(
        sizes=sizes,
        shape=shape,
        statistics=statistics,
        tokenizer=read_tokenizer(find_tokenizer(folder, tokenizer)),
        raw=raw,
        slots=max(slots, len(trained_images(raw))),
        folder=folder,
        weights=find_weights(folder, open_names),
        processors={path.name: path.read_bytes() for path in sorted(folder.glob("policy_p*processor*"))},
    )


def save_folder(
    module: FlowModule,
    checkpoint: FlowCheckpoint,
    folder: Path,
    *,
    raw: Mapping[str, Any],
    processors: Callable[[Mapping[str, Any]], Mapping[str, bytes]],
    public_name: Callable[[str], str],
    public_sizes: bool,
    prefix: str = LEROBOT,
    executed: int | None = None,
) -> None:
    """Write a folder in lerobot's layout, with adapters merged into the weights.

    Args:
        raw: config.json, for a checkpoint that has none in this layout.
        processors: config.json -> lerobot's files, for a checkpoint that has none.
        public_name: name of a parameter -> name in the files, without lerobot's prefix.
        public_sizes: config.json alone gives the network's sizes.
        prefix: prefix of every tensor's name.
        executed: actions of a chunk that the policy executes, as lerobot's config.json says; None: another layout.
    """
    folder.mkdir(parents=True, exist_ok=True)
    merged = MergedState(module.network)
    state = {prefix + public_name(name): merged.read_tensor(name).cpu().contiguous() for name in merged.tensors}
    save_tensors(state, folder / WEIGHTS, metadata={"format": "pt"})
    save_apart(module.network, folder)
    save_head(module.value_head, folder, VALUE_HEAD)
    save_head(module.noise_head, folder, NOISE_HEAD)
    save_head(module.steering, folder, STEERING_HEAD)
    settings = {**(checkpoint.raw or raw), **({} if executed is None else {EXECUTED: executed})}
    (folder / "config.json").write_bytes(encode_json(settings))
    for name, content in (checkpoint.processors or processors(settings)).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    if not public_sizes:
        (folder / ARCHITECTURE).write_bytes(encode_json(attrs.asdict(checkpoint.sizes)))
    checkpoint.tokenizer.save(str(folder / TOKENIZER), pretty=False)
