"""From a spec's config and a place in the run to a policy; everything that cannot fit is refused here."""

from __future__ import annotations

import torch
from attrs import evolve, frozen

from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import Context, EnvInfo
from vla_rl.plugins.models.pi0.architecture import TINY, Shape, network_config
from vla_rl.plugins.models.pi0.checkpoint import Checkpoint, open_checkpoint
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.plugins.models.pi0.images import ImageProcessor
from vla_rl.plugins.models.pi0.layout import public_name
from vla_rl.plugins.models.pi0.network import Pi0Module, empty_network, freeze_unused, initialise, stays_float32
from vla_rl.plugins.models.pi0.policy import Pi0Policy
from vla_rl.plugins.models.pi0.prompts import Prompts, train_tokenizer
from vla_rl.toolkit.models.adapters import insert_adapters
from vla_rl.toolkit.models.fitting import (
    MismatchError,
    check_action_dim,
    check_horizon,
    check_state_dim,
    choose_cameras,
    require_state,
    simulator_of,
)
from vla_rl.toolkit.models.flow_matching import Schedule
from vla_rl.toolkit.models.heads import NOISE_HEAD, VALUE_HEAD, HorizonValueHead, NoiseHead, load_head
from vla_rl.toolkit.models.lerobot import Scale, Statistics
from vla_rl.toolkit.models.networks import allocate, fill
from vla_rl.toolkit.models.scaling import Scaler


@frozen(kw_only=True)
class Fit:
    """What model, simulator and spec agree on."""

    checkpoint: Checkpoint
    cameras: tuple[str, ...]
    state: Scale | None
    """None: the model sees no state."""


def build_policy(config: Pi0Config, context: Context) -> Pi0Policy:
    """Raises CheckpointError or MismatchError when checkpoint, spec and simulator do not fit."""
    env = simulator_of(context, "pi0")
    device, dtype = torch.device(context.device), getattr(torch, config.dtype)
    if dtype == torch.float16 and device.type == "cpu":
        raise MismatchError("dtype float16 is for GPUs: on the CPU it overflows and is slow; use float32 or bfloat16")
    fit = _preset(config, context, env) if config.checkpoint is None else _fit(config, context, env)
    source = fit.checkpoint
    with torch.random.fork_rng(devices=[]):  # constructors of torch.nn draw numbers that are thrown away
        module = _module(config, context, fit, device, dtype).to(device)
    steps = (config.noise.steps or "one") if config.noise.method == "flow_sde" else "all"
    return Pi0Policy(
        module=module,
        checkpoint=source,
        prompts=Prompts(
            source.tokenizer,
            vocab=source.sizes.vocab,
            max_length=source.shape.tokenizer_max_length,
            device=device,
            instructions=[task.instruction for task in env.tasks],
            full_width=any(task.instruction_varies for task in env.tasks),
        ),
        images=ImageProcessor(source.sizes.image_size, device, dtype),
        schedule=Schedule(config.denoise_steps, config.noise.level or 0.5, device),
        every_step=steps == "all",
        actions=Scaler(source.statistics.action, device),
        state=None if fit.state is None else Scaler(fit.state, device),
        bounds=(env.action_low, env.action_high),
        cameras=fit.cameras,
        chunk=context.chunk,
        temperature=context.temperature,
        greedy_start=config.greedy_start,
        train_prefix=not config.train_expert_only,
        adapted=config.lora is not None,
        seed=context.seed,
        device=device,
    )


def _preset(config: Pi0Config, context: Context, env: EnvInfo) -> Fit:
    """Random weights: actions scaled by the simulator's bounds, the state as it is, no padding but of small states."""
    bounds = (tuple(map(float, env.action_low)), tuple(map(float, env.action_high)))
    uses_state = _uses_state(config, env)
    statistics = _measured(context) or Statistics(
        action=Scale(mode="MIN_MAX", values=bounds, dim=env.action_dim),
        state=Scale(mode="IDENTITY", values=(), dim=env.state_dim) if uses_state else None,
    )
    checkpoint = Checkpoint(
        sizes=TINY,
        shape=Shape(horizon=context.chunk, action_dim=env.action_dim, state_dim=max(env.state_dim, 1)),
        statistics=statistics,
        tokenizer=train_tokenizer((task.instruction for task in env.tasks), TINY.vocab),
        raw={},
    )
    return Fit(
        checkpoint=checkpoint, cameras=_cameras(config, env, None), state=statistics.state if uses_state else None
    )


def _fit(config: Pi0Config, context: Context, env: EnvInfo) -> Fit:
    assert config.checkpoint is not None
    checkpoint = open_checkpoint(config.checkpoint, config.tokenizer, config.asset_id)
    checkpoint = evolve(checkpoint, statistics=_measured(context) or checkpoint.statistics)
    scales, shape = checkpoint.statistics, checkpoint.shape
    where = f"{checkpoint.folder} was trained"
    check_action_dim(where, scales.action.dim, env)
    check_horizon(checkpoint.folder, shape.horizon, context.chunk)
    for name, scale, width in (("actions", scales.action, shape.action_dim), ("state", scales.state, shape.state_dim)):
        if scale is not None and scale.dim > width:
            raise MismatchError(f"{checkpoint.folder}: statistics of {scale.dim} {name}, the network takes {width}")
    if config.use_state is None and scales.state is not None and env.state_dim == 0:
        raise MismatchError(
            f"{where} on a {scales.state.dim}-dimensional state, and this simulator has none; "
            "use_state: false feeds zeros instead"
        )
    state = None
    if _uses_state(config, env) and not (config.use_state is None and scales.state is None):
        state = scales.state
        if state is None:
            raise MismatchError(f"{where} without a state; set use_state: false")
        check_state_dim(where, state.dim, env)
    return Fit(checkpoint=checkpoint, cameras=_cameras(config, env, checkpoint), state=state)


def _measured(context: Context) -> Statistics | None:
    """z-scores by the demonstrations, when the run scales by them."""
    found = context.statistics
    if found is None:
        return None
    scales = {
        name: Scale(mode="MEAN_STD", values=(tuple(part["mean"]), tuple(part["std"])), dim=len(part["mean"]))
        for name, part in found.items()
    }
    return Statistics(action=scales["action"], state=scales.get("state"))


def _uses_state(config: Pi0Config, env: EnvInfo) -> bool:
    if config.use_state:
        require_state(env, "use_state")
    return env.state_dim > 0 if config.use_state is None else config.use_state


def _cameras(config: Pi0Config, env: EnvInfo, checkpoint: Checkpoint | None) -> tuple[str, ...]:
    trained = () if checkpoint is None else checkpoint.images
    chosen = choose_cameras("pi0", env, config.cameras, trained, tuple(env.cameras))
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


def _module(config: Pi0Config, context: Context, fit: Fit, device: torch.device, dtype: torch.dtype) -> Pi0Module:
    """Weights from the folder, or random ones that depend on the seed alone."""
    source, sizes, shape = fit.checkpoint, fit.checkpoint.sizes, fit.checkpoint.shape
    pi0 = empty_network(network_config(sizes, shape))
    if source.weights is None:
        allocate(pi0, device, dtype, f"preset {config.preset}", stays_float32)
        initialise(pi0, derived_seed(context.seed, "pi0/network"))
    else:
        fill(pi0, source.weights, device, dtype, public_name=public_name, stays_float32=stays_float32)
    if config.train_expert_only:
        pi0.model.vlm.requires_grad_(False)
    else:
        freeze_unused(pi0)
    if fit.state is None:  # its input is zero
        pi0.embed_action_time.state_proj.weight.requires_grad_(False)
    if config.lora is not None:
        insert_adapters(pi0, config.lora, derived_seed(context.seed, "pi0/lora"))
    options, per_action = config.value_head, context.chunk if context.values == "action" else None
    value_head = noise_head = None
    if context.values != "none":
        seed = derived_seed(context.seed, "pi0/value_head")
        value_head = HorizonValueHead(sizes.expert_width, options.hidden, per_action, options.detach, seed)
    if config.noise.method == "flow_noise":
        seed = derived_seed(context.seed, "pi0/noise_head")
        bounds = config.noise.std_range or (0.08, 0.16)
        noise_head = NoiseHead(sizes.expert_width, shape.action_dim, bounds, seed)
    load_head(value_head, source.folder, VALUE_HEAD)
    load_head(noise_head, source.folder, NOISE_HEAD)
    return Pi0Module(pi0, value_head, noise_head)
