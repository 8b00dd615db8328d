"""Folder of a checkpoint: config.json (sizes, and what the policy was trained for), statistics.json (scaling of actions
and state), model.safetensors, and value_head.safetensors if there is a critic. Light to import: specs are checked with
it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs
from attrs import frozen

from vla_rl.core.errors import CheckpointError
from vla_rl.core.spec.structure import at
from vla_rl.core.types import Context
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig, NetworkConfig
from vla_rl.toolkit.models.checkpoints import find_weights, read_file, read_json, resolve
from vla_rl.toolkit.models.fitting import MismatchError, known_action_dim
from vla_rl.toolkit.models.lerobot import Statistics

BUILTIN = Path(__file__).parent / "checkpoints"
MODEL_TYPE = "film_resnet"
CONFIG, STATISTICS = "config.json", "statistics.json"
WANTED = ("*.json", "*.safetensors")
"""Files of a hub repository that are read."""


@frozen(kw_only=True)
class Setup:
    """Contents of config.json: sizes, and what the policy was trained for."""

    network: NetworkConfig
    cameras: tuple[str, ...]
    chunk: int
    action_dim: int
    state_dim: int
    """Number of state dimensions; 0: the policy does not see the state."""


def open_folder(name: str, download: bool = True) -> Path:
    return resolve(name, WANTED, BUILTIN, download)


def read_setup(folder: Path) -> Setup:
    """Read config.json. Raise CheckpointError where it cannot be read, or is of another model."""

    def read(path: Path) -> Setup:
        raw = read_json(path)
        kind = raw.pop("model_type", None)
        if kind != MODEL_TYPE:
            raise CheckpointError(
                f"{folder} holds a model of type {kind!r}, not {MODEL_TYPE!r}; choose the model plugin that matches it"
            )
        return cattrs.Converter(forbid_extra_keys=True).structure(raw, Setup)

    return read_file(folder / CONFIG, read)


def read_statistics(folder: Path) -> Statistics:
    """Read statistics.json. Raise CheckpointError where it cannot be read."""
    return read_file(folder / STATISTICS, lambda path: cattrs.structure(read_json(path), Statistics))


def write_setup(folder: Path, setup: Setup, statistics: Statistics) -> None:
    files: Mapping[str, dict[str, Any]] = {
        CONFIG: {"model_type": MODEL_TYPE, **attrs.asdict(setup)},
        STATISTICS: attrs.asdict(statistics),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def check_setup(folder: Path, setup: Setup, config: FilmResnetConfig, chunk: int) -> None:
    """Check that the folder's network has the spec's sizes and was trained for its chunk. Raise MismatchError
    otherwise."""
    if setup.chunk != chunk:
        raise MismatchError(
            f"{folder} was trained for chunks of {setup.chunk}, the spec asks for {chunk}; "
            f"set rollout.chunk to {setup.chunk}"
        )
    if config.network not in (None, setup.network):
        own, asked = attrs.asdict(setup.network), attrs.asdict(config.network)
        other = ", ".join(f"{key} {own[key]} (the spec: {asked[key]})" for key in own if own[key] != asked[key])
        raise MismatchError(
            f"{folder} was trained with another network: {other}; leave model.network out, or train a new one of "
            "these sizes (model.checkpoint: null)"
        )


def check(config: FilmResnetConfig, context: Context) -> None:
    """Check, for `Plugin.check`, that the folder is complete, of this model, and of the spec's sizes and chunk."""
    if config.checkpoint is None:
        return
    with at("checkpoint"):
        folder = open_folder(config.checkpoint, download=False)
        check_setup(folder, read_setup(folder), config, context.chunk)
        read_statistics(folder)
        find_weights(folder)


def action_dim(config: FilmResnetConfig) -> int | None:
    """Return the number of action dimensions that the checkpoint was trained for, where it is known
    (`known_action_dim`)."""
    return known_action_dim(config.checkpoint, lambda folder: read_setup(folder).action_dim, WANTED, BUILTIN)
