"""From a spec's config and a place in the run to a policy; everything that cannot fit is refused here."""

from __future__ import annotations

import torch

from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import Context, EnvInfo
from vla_rl.plugins.models.pi0.architecture import TINY, network_config
from vla_rl.plugins.models.pi0.checkpoint import SLOTS, open_checkpoint
from vla_rl.plugins.models.pi0.config import Pi0Config
from vla_rl.plugins.models.pi0.layout import public_name
from vla_rl.plugins.models.pi0.network import Pi0Module, empty_network, freeze_unused, initialise, stays_float32
from vla_rl.plugins.models.pi0.policy import Pi0Policy
from vla_rl.plugins.models.pi0.prompts import Prompts, prompt_text
from vla_rl.toolkit.models.fitting import simulator_of
from vla_rl.toolkit.models.flow_checkpoint import Checkpoint, Shape
from vla_rl.toolkit.models.flow_fit import (
    Fit,
    add_adapters,
    fit_checkpoint,
    fit_preset,
    make_heads,
    measured,
    precision,
    preset_statistics,
    uses_state,
)
from vla_rl.toolkit.models.images import ImageProcessor
from vla_rl.toolkit.models.networks import allocate, fill
from vla_rl.toolkit.models.prompts import train_tokenizer


def build_policy(config: Pi0Config, context: Context) -> Pi0Policy:
    """Raises CheckpointError or MismatchError when checkpoint, spec and simulator do not fit."""
    env = simulator_of(context, "pi0")
    device = torch.device(context.device)
    dtype = precision(config, device)
    fit = _preset(config, context, env) if config.checkpoint is None else _fit(config, context, env)
    source = fit.checkpoint
    with torch.random.fork_rng(devices=[]):  # constructors of torch.nn draw numbers that are thrown away
        module = _module(config, context, fit, device, dtype).to(device)
    prompts = Prompts(
        source.tokenizer,
        vocab=source.sizes.vocab,
        max_length=source.shape.tokenizer_max_length,
        device=device,
        instructions=[task.instruction for task in env.tasks],
        full_width=any(task.instruction_varies for task in env.tasks),
    )
    images = ImageProcessor(source.sizes.image_size, device, dtype)
    return Pi0Policy(config, context, fit, module, images, device, prompts=prompts)


def _preset(config: Pi0Config, context: Context, env: EnvInfo) -> Fit:
    """Random weights, no padding but of small states."""
    sees = uses_state(config.use_state, env)
    checkpoint = Checkpoint(
        sizes=TINY,
        shape=Shape(horizon=context.chunk, action_dim=env.action_dim, state_dim=max(env.state_dim, 1)),
        statistics=measured(context) or preset_statistics(context, env, sees),
        tokenizer=train_tokenizer((task.instruction for task in env.tasks), prompt_text, TINY.vocab),
        raw={},
        slots=SLOTS,
    )
    return fit_preset("pi0", config, env, checkpoint, sees)


def _fit(config: Pi0Config, context: Context, env: EnvInfo) -> Fit:
    assert config.checkpoint is not None
    checkpoint = open_checkpoint(config.checkpoint, config.tokenizer, config.asset_id)
    return fit_checkpoint("pi0", config, context, env, checkpoint, config.use_state)


def _module(config: Pi0Config, context: Context, fit: Fit, device: torch.device, dtype: torch.dtype) -> Pi0Module:
    """Weights from the folder, or random ones that depend on the seed alone."""
    source, sizes = fit.checkpoint, fit.checkpoint.sizes
    pi0 = empty_network(network_config(sizes, source.shape))
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
    add_adapters("pi0", config, context, pi0)
    widths = sizes.expert_width, sizes.text_width
    return Pi0Module(pi0, *make_heads("pi0", config, config.value_head, context, source, *widths))
