"""Matching of a chunk-denoising model, a simulator and a spec, and the parts of its policy that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from attrs import evolve, frozen
from torch import nn

from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import Context, EnvInfo
from vla_rl.toolkit.models.adapters import insert_adapters
from vla_rl.toolkit.models.fitting import (
    MismatchError,
    check_action_dim,
    check_action_range,
    check_horizon,
    check_state_dim,
    choose_cameras,
    require_state,
)
from vla_rl.toolkit.models.flow_checkpoint import ARCHITECTURE, FlowCheckpoint
from vla_rl.toolkit.models.flow_config import FlowConfig, PrefixHeadConfig, ValueHeadConfig
from vla_rl.toolkit.models.flow_network import freeze_unused
from vla_rl.toolkit.models.heads import NOISE_HEAD, VALUE_HEAD, HorizonValueHead, NoiseHead, PrefixValueHead, load_head
from vla_rl.toolkit.models.lerobot import FeatureScale, Statistics, rescaled
from vla_rl.toolkit.models.networks import allocate, check_shapes, fill

M = TypeVar("M", bound=nn.Module)


@frozen(kw_only=True)
class FlowIOAdapter:
    """Inputs and outputs on which model, simulator and spec agree."""

    checkpoint: FlowCheckpoint
    cameras: tuple[str, ...]
    state: FeatureScale | None
    """Normalisation of the state; None: the model sees no state."""


def precision(config: FlowConfig, device: torch.device) -> torch.dtype:
    """Return the precision of the towers. Raise MismatchError if it is unsuitable for the device."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    if dtype == torch.float16 and device.type == "cpu":
        raise MismatchError("dtype float16 is for GPUs: on the CPU it overflows and is slow; use float32 or bfloat16")
    return dtype


def preset_statistics(context: Context, env: EnvInfo, uses_state: bool) -> Statistics:
    """Return statistics that scale actions by the simulator's bounds and leave the state as it is."""
    bounds = (tuple(map(float, env.action_low)), tuple(map(float, env.action_high)))
    return Statistics(
        action=FeatureScale(mode="MIN_MAX", values=bounds, dim=env.action_dim),
        state=FeatureScale(mode="IDENTITY", values=(), dim=env.state_dim) if uses_state else None,
    )


def fit_preset(
    name: str, config: FlowConfig, env: EnvInfo, checkpoint: FlowCheckpoint, uses_state: bool
) -> FlowIOAdapter:
    """Adapt a network with random weights to the simulator."""
    return FlowIOAdapter(
        checkpoint=checkpoint,
        cameras=_cameras(name, config, env, None),
        state=checkpoint.statistics.state if uses_state else None,
    )


def fit_checkpoint(
    name: str,
    config: FlowConfig,
    context: Context,
    env: EnvInfo,
    checkpoint: FlowCheckpoint,
    use_state: bool | None,
    *,
    blind: str = "use_state: false",
    quantiles: bool = False,
    gripper: str | None = None,
    converts: bool = False,
) -> FlowIOAdapter:
    """Match checkpoint, spec and simulator. Raise MismatchError if they are incompatible.

    Args:
        use_state: None: as the checkpoint was trained.
        blind: what a spec says for a model that shall see no state.
        quantiles: scale by quantiles where the run measures the demonstrations; else by z-scores.
        gripper, converts: as in `check_action_range`.
    """
    own = measured(context, quantiles)
    if own is not None:  # lerobot's files hold the checkpoint's statistics: rewrite them
        told = {**checkpoint.shape.written(), **checkpoint.raw} if checkpoint.raw else {}
        checkpoint = evolve(checkpoint, statistics=own, raw=rescaled(told, own), processors={})
    scales, shape = checkpoint.statistics, checkpoint.shape
    where = f"{checkpoint.folder} was trained"
    check_action_dim(where, scales.action.dim, env)
    source = f"statistics of {'the demonstrations' if own is not None else checkpoint.folder}"
    check_action_range(source, scales.action.ranges(), env, gripper=gripper, converts=converts)
    check_horizon(checkpoint.folder, shape.horizon, context.chunk)
    for part, scale, width in (("actions", scales.action, shape.action_dim), ("state", scales.state, shape.state_dim)):
        if scale is not None and scale.dim > width:
            raise MismatchError(f"{checkpoint.folder}: statistics of {scale.dim} {part}, the network takes {width}")
    if use_state is None and scales.state is not None and env.state_dim == 0:
        raise MismatchError(
            f"{where} on a {scales.state.dim}-dimensional state, and this simulator has none; "
            f"{blind} feeds none instead"
        )
    state = None
    if uses_state(use_state, env) and not (use_state is None and scales.state is None):
        state = scales.state
        if state is None:
            raise MismatchError(f"{where} without a state; set {blind}")
        check_state_dim(where, state.dim, env)
    return FlowIOAdapter(checkpoint=checkpoint, cameras=_cameras(name, config, env, checkpoint), state=state)


def measured(context: Context, quantiles: bool = False) -> Statistics | None:
    """Return the statistics of the demonstrations if the run normalises by them, else None: z-scores, or quantiles from
    the 1st to the 99th percentile."""
    found = context.scaling
    if found is None:
        return None
    mode, low, high = ("QUANTILES", "q01", "q99") if quantiles else ("MEAN_STD", "mean", "std")
    scales = {
        name: FeatureScale(mode=mode, values=(tuple(part[low]), tuple(part[high])), dim=len(part[low]))
        for name, part in found.items()
    }
    return Statistics(action=scales["action"], state=scales.get("state"))


def uses_state(use_state: bool | None, env: EnvInfo) -> bool:
    if use_state:
        require_state(env, "use_state")
    return env.state_dim > 0 if use_state is None else use_state


def _cameras(name: str, config: FlowConfig, env: EnvInfo, checkpoint: FlowCheckpoint | None) -> tuple[str, ...]:
    trained = () if checkpoint is None else checkpoint.images
    chosen = choose_cameras(name, env, config.cameras, trained, tuple(env.cameras))
    if config.cameras is None and trained and len(trained) != len(chosen):
        raise MismatchError(
            f"the checkpoint was trained with {len(trained)} cameras ({', '.join(trained)}), the simulator has "
            f"{len(chosen)} ({', '.join(chosen)}); name those it shall see in model.cameras, in the order of its images"
        )
    if checkpoint is not None and len(chosen) > checkpoint.slots:
        raise MismatchError(
            f"the checkpoint takes {checkpoint.slots} cameras, the policy would see {len(chosen)} "
            f"({', '.join(chosen)}); name the right ones in model.cameras"
        )
    return chosen


def choose_trained(config: FlowConfig, vlm: nn.Module, language: Any, head: nn.Module | None) -> None:
    """Freeze the vision-language model, or, if it is trained, its parts without influence. A critic that reads its
    output makes all of it matter."""
    if config.train_expert_only:
        vlm.requires_grad_(False)
    elif not isinstance(head, PrefixValueHead) or head.detach:
        freeze_unused(language)


def prompt_options(checkpoint: FlowCheckpoint, env: EnvInfo, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `PaddedPrompts`."""
    return {
        "tokenizer": checkpoint.tokenizer,
        "vocab": checkpoint.sizes.vocab,
        "max_length": checkpoint.shape.tokenizer_max_length,
        "device": device,
        "instructions": [task.instruction for task in env.tasks],
        "full_width": any(task.instruction_varies for task in env.tasks),
    }


def begin(checkpoint: FlowCheckpoint, make: Callable[[], M], public_name: Callable[[str], str]) -> M:
    """What `make` makes, a network whose memory is not initialised. Where a file tells its sizes, they are compared
    with the weights before there is memory for them. Raises CheckpointError."""
    if checkpoint.weights is not None and (checkpoint.weights.folder / ARCHITECTURE).is_file():
        with torch.device("meta"):
            check_shapes(make(), checkpoint.weights, public_name)
    return make()


def give_weights(
    name: str,
    config: FlowConfig,
    context: Context,
    checkpoint: FlowCheckpoint,
    network: nn.Module,
    start: Callable[[Any, int], None],
    **rules: Any,
) -> None:
    """Load the folder's weights, or set random ones (`start`) that depend on the seed alone; on the device, in the
    spec's precision. `rules`: `public_name` and `stays_float32` of `networks.fill`."""
    device = torch.device(context.device)
    dtype = precision(config, device)
    if checkpoint.weights is not None:
        fill(network, checkpoint.weights, device, dtype, **rules)
        return
    allocate(network, device, dtype, f"preset {config.preset}", rules["stays_float32"])
    start(network, derived_seed(context.seed, f"{name}/network"))


def add_adapters(name: str, config: FlowConfig, context: Context, network: nn.Module) -> None:
    """Insert adapters on everything trained so far, if the spec asks for them."""
    if config.lora is not None:
        insert_adapters(network, config.lora, derived_seed(context.seed, f"{name}/lora"))


def make_heads(
    name: str,
    config: FlowConfig,
    options: ValueHeadConfig | PrefixHeadConfig,
    context: Context,
    checkpoint: FlowCheckpoint,
    expert_width: int,
    prefix_width: int,
) -> tuple[HorizonValueHead | PrefixValueHead | None, NoiseHead | None]:
    """Return the critic and Flow-Noise's network that algorithm and spec need, as saved beside the checkpoint or
    new."""
    value_head: HorizonValueHead | PrefixValueHead | None = None
    noise_head = None
    if context.values != "none":
        per_action = context.chunk if context.values == "action" else None
        seed = derived_seed(context.seed, f"{name}/value_head")
        rest = options.hidden, per_action, options.detach, seed
        if options.reads == "prefix":
            value_head = PrefixValueHead(prefix_width, *rest)
        else:
            value_head = HorizonValueHead(expert_width, *rest)
            value_head.passes = config.denoise_steps if options.reads == "denoising" else 1
    if config.noise.method == "flow_noise":
        seed = derived_seed(context.seed, f"{name}/noise_head")
        bounds = config.noise.std_range or (0.08, 0.16)
        noise_head = NoiseHead(expert_width, checkpoint.shape.action_dim, bounds, seed)
    load_head(value_head, checkpoint.folder, VALUE_HEAD)
    load_head(noise_head, checkpoint.folder, NOISE_HEAD)
    return value_head, noise_head
