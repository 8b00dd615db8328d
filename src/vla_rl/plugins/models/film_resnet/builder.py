"""Builds the policy from a spec's config and a worker's context; refuses what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch

from vla_rl.core.contexts import ModelContext
from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import EnvInfo
from vla_rl.plugins.models.film_resnet.checkpoint import Setup, check_setup, open_folder, read_setup, read_statistics
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig, Gaussian, NetworkConfig
from vla_rl.plugins.models.film_resnet.gaussian_policy import GaussianFilmResnetPolicy
from vla_rl.plugins.models.film_resnet.network import FilmResnet, FilmValueHead, initialise_weights
from vla_rl.plugins.models.film_resnet.policy import FilmPolicy, FilmResnetPolicy
from vla_rl.toolkit.models.checkpoints.files import find_weights
from vla_rl.toolkit.models.checkpoints.fitting import (
    MismatchError,
    check_action_dim,
    check_action_range,
    check_camera_count,
    check_state_dim,
    choose_cameras,
    require_state,
)
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale, Statistics, bounds_statistics
from vla_rl.toolkit.models.heads import VALUE_HEAD, load_head
from vla_rl.toolkit.models.networks import construct_module, fill_network

NAME = "film_resnet"


def build_policy(config: FilmResnetConfig, context: ModelContext) -> FilmPolicy:
    """Build the policy. Raise CheckpointError or MismatchError when checkpoint, spec and simulator do not fit."""
    env = context.env
    folder = None if config.checkpoint is None else open_folder(config.checkpoint)
    setup = _make_setup(config, context, env) if folder is None else _match_setup(folder, config, context, env)
    measured = _data_statistics(context, setup)
    statistics = measured or (
        bounds_statistics(env, setup.state_dim > 0) if folder is None else read_statistics(folder, setup)
    )
    source = f"statistics of {folder if measured is None else 'the demonstrations'}"
    check_action_range(source, statistics.action.usual_ranges(), env)
    device, dtype = torch.device(context.device), getattr(torch, config.dtype)
    module = construct_module(lambda: _build_module(config, context, setup, folder, device, dtype), device)
    shared: dict[str, Any] = {
        "module": module,
        "setup": setup,
        "statistics": statistics,
        "instructions": [task.instruction for task in env.tasks],
        "temperature": context.temperature,
        "shift": config.shift,
        "seed": context.seed,
        "device": device,
        "dtype": dtype,
    }
    head = setup.network.head
    if isinstance(head, Gaussian):
        return GaussianFilmResnetPolicy(**shared)
    return FilmResnetPolicy(bins=head.count, greedy=config.greedy, smoothing=config.smoothing, **shared)


def _make_setup(config: FilmResnetConfig, context: ModelContext, env: EnvInfo) -> Setup:
    if config.use_state:
        require_state(env, "use_state")
    return Setup(
        network=config.network or NetworkConfig(),
        cameras=choose_cameras(NAME, env, config.cameras, (), tuple(env.cameras)),
        chunk=context.chunk,
        action_dim=env.action_dim,
        state_dim=0 if config.use_state is False else env.state_dim,
    )


def _match_setup(folder: Path, config: FilmResnetConfig, context: ModelContext, env: EnvInfo) -> Setup:
    setup = read_setup(folder)
    check_setup(folder, setup, config, context.chunk)
    trained = f"{folder} was trained"
    check_action_dim(trained, setup.action_dim, env)
    if config.use_state is not None and config.use_state != (setup.state_dim > 0):
        raise MismatchError(f"{trained} {'with' if setup.state_dim else 'without'} a state; leave model.use_state out")
    if setup.state_dim:
        check_state_dim(trained, setup.state_dim, env)
    cameras = choose_cameras(NAME, env, config.cameras, setup.cameras, tuple(env.cameras))
    check_camera_count(setup.cameras, cameras)
    return attrs.evolve(setup, cameras=cameras)


def _data_statistics(context: ModelContext, setup: Setup) -> Statistics | None:
    """Return the statistics of the demonstrations, if the run scales by them: quantiles of the actions, z-scores of the
    state; else None."""
    scaling = context.scaling
    if scaling is None:
        return None

    def make_scale(part: str, mode: str, first: str, second: str) -> FeatureScale:
        values = (tuple(map(float, scaling[part][first])), tuple(map(float, scaling[part][second])))
        return FeatureScale(mode=mode, values=values, dim=len(values[0]))

    return Statistics(
        action=make_scale("action", "QUANTILES", "q01", "q99"),
        state=make_scale("state", "MEAN_STD", "mean", "std") if setup.state_dim else None,
    )


def _build_module(
    config: FilmResnetConfig,
    context: ModelContext,
    setup: Setup,
    folder: Path | None,
    device: torch.device,
    dtype: torch.dtype,
) -> FilmResnet:
    """Weights from the folder, or random ones that depend on the seed alone. The critic stays in float32."""
    with torch.device("cpu" if folder is None else "meta"):
        module = FilmResnet(setup.network, len(setup.cameras), setup.state_dim, setup.chunk, setup.action_dim)
    if folder is None:
        initialise_weights(module, derived_seed(context.seed, "film_resnet/network"))
        module.to(device, dtype)
    else:
        fill_network(module, find_weights(folder), device, dtype)
    if context.values != "none":
        outputs = context.chunk if context.values == "action" else None
        seed, options = derived_seed(context.seed, "film_resnet/value_head"), config.value_head
        module.value_head = FilmValueHead(module.features, options.hidden, outputs, options.detach, seed)
        load_head(module.value_head, folder, VALUE_HEAD)
    return module
