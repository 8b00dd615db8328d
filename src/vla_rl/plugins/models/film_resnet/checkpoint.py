"""Folder of a checkpoint: config.json (sizes, and what the policy was trained for), statistics.json (scaling of actions
and state), model.safetensors, and value_head.safetensors if it has a critic. Light to import: specs are checked with
it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import evolve, frozen

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import CheckpointError
from vla_rl.core.spec.structure import at
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig, NetworkConfig
from vla_rl.toolkit.json_files import encode_json
from vla_rl.toolkit.models.checkpoints.files import (
    MAX_CHUNK,
    WANTED,
    check_size,
    check_sizes,
    find_weights,
    read_class,
    read_json,
    resolve_checkpoint,
)
from vla_rl.toolkit.models.checkpoints.fitting import MismatchError, known_number
from vla_rl.toolkit.models.checkpoints.lerobot import MODES, FeatureScale, Statistics, check_scale

BUILTIN = Path(__file__).parent / "checkpoints"
MODEL_TYPE = "film_resnet"
CONFIG, STATISTICS = "config.json", "statistics.json"


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
    return resolve_checkpoint(name, WANTED, BUILTIN, download)


def read_setup(folder: Path) -> Setup:
    """Raises CheckpointError where config.json cannot be read, or is of another model."""
    path = folder / CONFIG
    raw = read_json(path)
    kind = raw.pop("model_type", None)
    if kind != MODEL_TYPE:
        raise CheckpointError(
            f"{folder} holds a model of type {kind!r}, not {MODEL_TYPE!r} ('model_type' of {CONFIG}); choose the model "
            "plugin that matches it"
        )
    setup = read_class(path, raw, Setup)
    check_sizes(f"{path}: network", evolve(setup.network, state_waves=1))
    if not 1 <= setup.chunk <= MAX_CHUNK:
        raise CheckpointError(f"{path}: 'chunk' is {setup.chunk}, a whole number from 1 to {MAX_CHUNK:,} is expected")
    check_size(path, "action_dim", setup.action_dim)
    check_size(path, "state_dim", setup.state_dim, 0)
    return setup


def read_statistics(folder: Path, setup: Setup) -> Statistics:
    """Raises CheckpointError where they cannot be read, or are not of the network's actions and state."""
    path = folder / STATISTICS
    statistics = read_class(path, read_json(path), Statistics)
    _check_scale(path, "action", statistics.action, setup.action_dim)
    if setup.state_dim and statistics.state is None:
        raise CheckpointError(f"{path}: 'state' is missing, and the network sees one of {setup.state_dim} numbers")
    if statistics.state is not None:
        _check_scale(path, "state", statistics.state, setup.state_dim)
    return statistics


def _check_scale(path: Path, name: str, scale: FeatureScale, dim: int) -> None:
    names = MODES.get(scale.mode)
    if names is None:
        raise CheckpointError(f"{path}: {name}: 'mode' is {scale.mode!r}, one of {', '.join(MODES)} is expected")
    if scale.dim != dim:
        raise CheckpointError(f"{path}: {name}: 'dim' is {scale.dim}, the {dim} of {CONFIG} is expected")
    if len(scale.values) != len(names) or any(len(numbers) != dim for numbers in scale.values):
        lengths = ", ".join(str(len(numbers)) for numbers in scale.values) or "no"
        raise CheckpointError(
            f"{path}: {name}: 'values' is {len(scale.values)} lists of {lengths} numbers, {len(names)} of {dim} are "
            "expected"
        )
    for key in ("eps", "margin"):
        if not 0 <= getattr(scale, key) <= 1:
            raise CheckpointError(f"{path}: {name}: {key!r} is {getattr(scale, key)}, a number from 0 to 1 is expected")
    check_scale(f"{path}: {name}", scale.mode, dict(zip(names, scale.values, strict=True)))


def write_setup(folder: Path, setup: Setup, statistics: Statistics) -> None:
    files: Mapping[str, dict[str, Any]] = {
        CONFIG: {"model_type": MODEL_TYPE, **attrs.asdict(setup)},
        STATISTICS: attrs.asdict(statistics),
    }
    for name, content in files.items():
        (folder / name).write_bytes(encode_json(content, indent=1))


def check_setup(folder: Path, setup: Setup, config: FilmResnetConfig, chunk: int) -> None:
    """Check that the folder's network has the spec's sizes and was trained for its chunk. Raises MismatchError."""
    if setup.chunk != chunk:
        raise MismatchError(
            f"{folder} was trained for chunks of {setup.chunk}, the spec asks for {chunk}; "
            f"set rollout.chunk to {setup.chunk}"
        )
    unused = config.without_effect(setup.network)
    if unused:
        raise MismatchError(f"{folder} has a Gaussian head, so model.{unused[0]} has no effect; leave it out")
    if config.network not in (None, setup.network):
        trained = attrs.asdict(setup.network)
        requested = attrs.asdict(config.network)
        differing = [key for key in trained if trained[key] != requested[key]]
        other = ", ".join(f"{key} {trained[key]} (the spec: {requested[key]})" for key in differing)
        raise MismatchError(
            f"{folder} was trained with another network: {other}; leave model.network out, or train a new one of "
            "these sizes (model.checkpoint: null)"
        )


def check_checkpoint(config: FilmResnetConfig, context: CheckContext) -> None:
    """Check that the folder is complete, of this model, and of the spec's sizes and chunk."""
    if config.checkpoint is None:
        return
    with at("checkpoint"):
        folder = open_folder(config.checkpoint, download=False)
        setup = read_setup(folder)
        check_setup(folder, setup, config, context.chunk)
        read_statistics(folder, setup)
        find_weights(folder)


def action_dim(config: FilmResnetConfig) -> int | None:
    """Return the number of action dimensions that the checkpoint was trained for, where known (`known_number`)."""
    return known_number(config.checkpoint, lambda folder: read_setup(folder).action_dim, WANTED, BUILTIN)
