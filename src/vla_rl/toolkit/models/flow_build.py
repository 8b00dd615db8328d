"""Construction of a flow-matching policy's network: weights, heads, and the parts that are trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from attrs import asdict
from safetensors.torch import load_file
from torch import Tensor, nn

from vla_rl.core.contexts import ModelContext
from vla_rl.core.errors import CheckpointError
from vla_rl.core.randomness import derived_seed
from vla_rl.toolkit.models.adapters import insert_adapters
from vla_rl.toolkit.models.checkpoints import read_file
from vla_rl.toolkit.models.fitting import MismatchError
from vla_rl.toolkit.models.flow_checkpoint import ARCHITECTURE, FlowCheckpoint
from vla_rl.toolkit.models.flow_config import FlowConfig, FlowNoise, PrefixHeadConfig, ValueHeadConfig
from vla_rl.toolkit.models.flow_network import FlowModule, freeze_unused
from vla_rl.toolkit.models.heads import (
    NOISE_HEAD,
    STEERING_HEAD,
    VALUE_HEAD,
    HorizonValueHead,
    NoiseHead,
    PrefixValueHead,
    load_head,
)
from vla_rl.toolkit.models.meta_device import META
from vla_rl.toolkit.models.networks import allocate_network, check_shapes, fill_network, load_weights, same_name
from vla_rl.toolkit.models.steering import SteeringHead, saved_settings

Network = TypeVar("Network", bound=nn.Module)


def choose_precision(config: FlowConfig, device: torch.device) -> torch.dtype:
    """Return the precision of the towers. Raise MismatchError if it is unsuitable for the device."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    if dtype == torch.float16 and device.type == "cpu":
        raise MismatchError("dtype float16 is for GPUs: on the CPU it overflows and is slow; use float32 or bfloat16")
    return dtype


def build_network(
    name: str,
    config: FlowConfig,
    context: ModelContext,
    checkpoint: FlowCheckpoint,
    empty: Callable[[], Network],
    initialise: Callable[[Network, int], None],
    *,
    stays_float32: Callable[[str], bool],
    public_name: Callable[[str], str] = same_name,
) -> Network:
    """Return the network on the device, in the spec's precision, with the folder's weights or with random ones that
    depend on the seed alone. Raise CheckpointError where the weights do not fit.

    Args:
        empty: builds the network with uninitialised memory. Where a file describes its sizes, they are compared with
            the weights before memory is allocated.
        initialise: (network, seed) -> None; sets random weights.
        stays_float32, public_name: as in `networks.fill_network`.
    """
    weights = checkpoint.weights
    if weights is not None and (weights.folder / ARCHITECTURE).is_file():
        with torch.device("meta"):
            check_shapes(empty(), weights, public_name)
    device = torch.device(context.device)
    with torch.device(device) if device.type == META else nullcontext():
        network = empty()
    dtype = choose_precision(config, device)
    if weights is not None:
        fill_network(network, weights, device, dtype, public_name=public_name, stays_float32=stays_float32)
    else:
        allocate_network(network, device, dtype, f"preset {config.preset}", stays_float32)
        initialise(network, derived_seed(context.seed, f"{name}/network"))
    return network


def choose_trained(
    name: str,
    config: FlowConfig,
    context: ModelContext,
    network: nn.Module,
    *,
    vlm: nn.Module,
    language: Any = None,
    head: nn.Module | None = None,
    unused: Tensor | None = None,
) -> None:
    """Freeze what the spec does not train and what has no influence, then insert adapters if the spec asks for them.

    Args:
        vlm: vision-language model, frozen with `train_expert_only`.
        language: its language model, whose parts without influence are frozen otherwise. A critic (`head`) that reads
            its output makes all of it matter.
        unused: weight that gets no input, such as that of a state fed as zeros.
    """
    if config.train_expert_only:
        vlm.requires_grad_(False)
    elif language is not None and (not isinstance(head, PrefixValueHead) or head.detach):
        freeze_unused(language)
    if unused is not None:
        unused.requires_grad_(False)
    if config.lora is not None:
        insert_adapters(network, config.lora, derived_seed(context.seed, f"{name}/lora"))


def make_heads(
    name: str,
    config: FlowConfig,
    options: ValueHeadConfig | PrefixHeadConfig,
    context: ModelContext,
    checkpoint: FlowCheckpoint,
    expert_width: int,
    prefix_width: int,
) -> tuple[HorizonValueHead | PrefixValueHead | None, NoiseHead | None]:
    """Return the critic and Flow-Noise's network that algorithm and spec need, as saved with the checkpoint or
    new."""
    value_head: HorizonValueHead | PrefixValueHead | None = None
    noise_head = None
    if context.values != "none":
        per_action = context.chunk if context.values == "action" else None
        seed = derived_seed(context.seed, f"{name}/value_head")
        arguments = options.hidden, per_action, options.detach, seed
        if options.reads == "prefix":
            value_head = PrefixValueHead(prefix_width, *arguments)
        else:
            value_head = HorizonValueHead(expert_width, *arguments)
            value_head.passes = config.denoise_steps if options.reads == "denoising" else 1
    if isinstance(config.noise, FlowNoise):
        seed = derived_seed(context.seed, f"{name}/noise_head")
        noise_head = NoiseHead(expert_width, checkpoint.shape.action_dim, config.noise.std_range, seed)
    load_head(value_head, checkpoint.folder, VALUE_HEAD)
    load_head(noise_head, checkpoint.folder, NOISE_HEAD)
    return value_head, noise_head


def add_steering(
    name: str,
    config: FlowConfig,
    context: ModelContext,
    checkpoint: FlowCheckpoint,
    module: FlowModule,
    expert_width: int,
) -> None:
    """Add the steering head that spec or checkpoint ask for, and freeze the network then."""
    head = _make_steering_head(name, config, context, checkpoint, expert_width)
    if head is not None:
        module.attach_steering(head)


def _make_steering_head(
    name: str, config: FlowConfig, context: ModelContext, checkpoint: FlowCheckpoint, expert_width: int
) -> SteeringHead | None:
    """Return the head that was saved with the checkpoint, or a new one that the spec asks for, else None.

    Raises CheckpointError for a damaged file, and MismatchError where the spec asks for another head than the saved.
    """
    path = None if checkpoint.folder is None else checkpoint.folder / STEERING_HEAD
    saved = None if path is None or not path.is_file() else read_file(path, load_file)
    settings = config.steering
    shape = (checkpoint.shape.horizon, checkpoint.shape.action_dim)
    if saved is not None:
        assert path is not None
        try:
            recorded = saved_settings(saved, shape[1])
        except (KeyError, ValueError) as exc:
            raise CheckpointError(f"{path} is not a steering head ({exc}); remove it to go without") from exc
        if settings is not None and settings != recorded:
            raise MismatchError(
                f"{path} has {asdict(recorded)}, and model.steering asks for {asdict(settings)}; leave model.steering "
                f"out, or take the folder of the policy that is not steered yet"
            )
        settings = recorded
    if settings is None:
        return None
    inputs = expert_width + checkpoint.shape.state_dim
    head = SteeringHead(inputs, shape, settings, derived_seed(context.seed, f"{name}/steering"))
    if saved is not None:
        assert path is not None
        load_weights(head, saved, path)
    return head
