"""From a spec's config and a place in the run to a policy; everything that cannot fit is refused here."""

from __future__ import annotations

import logging
from typing import Any

import torch
from attrs import evolve
from tokenizers import AddedToken, Tokenizer

from vla_rl.core.types import Context, EnvInfo
from vla_rl.plugins.models.gr00t import network
from vla_rl.plugins.models.gr00t.config import GrootConfig
from vla_rl.plugins.models.gr00t.folder import (
    HEAD,
    METADATA,
    MODEL_TYPE,
    WANTED,
    Robot,
    Sizes,
    horizon,
    read_config,
    read_robot,
)
from vla_rl.plugins.models.gr00t.policy import SPECIAL, GrootCheckpoint, GrootPolicy, Prompts
from vla_rl.toolkit.models import flow_fit
from vla_rl.toolkit.models.checkpoints import find_tokenizer, find_weights, read_file, read_json, resolve
from vla_rl.toolkit.models.fitting import simulator_of
from vla_rl.toolkit.models.flow_checkpoint import ARCHITECTURE, Shape
from vla_rl.toolkit.models.images import CroppedImages
from vla_rl.toolkit.models.lerobot import Scale
from vla_rl.toolkit.models.prompts import train_tokenizer

logger = logging.getLogger(__name__)
SLOTS = 3
TINY = Sizes(
    text_width=64, text_mlp=128, text_depth=2, heads=4, kv_heads=2, head_dim=16, vocab=512,
    vision_width=48, vision_mlp=192, vision_depth=2, vision_heads=4, image_size=64, patch_size=16,
    mixer_depth=1, mixer_heads=4, dit_depth=4, dit_heads=4, dit_head_dim=16, hidden=64, output=64,
    future_tokens=4, positions=256,
)  # fmt: skip


def build_policy(config: GrootConfig, context: Context) -> GrootPolicy:
    """Raises CheckpointError or MismatchError when checkpoint, spec and simulator do not fit."""
    env = simulator_of(context, "gr00t")
    device = torch.device(context.device)
    dtype = flow_fit.precision(config, device)
    fit = (_preset if config.checkpoint is None else _fit)(config, context, env)
    scales = fit.checkpoint.statistics
    scales = evolve(scales, action=_flat(scales.action), state=_flat(scales.state))
    source = evolve(fit.checkpoint, statistics=scales)
    fit = evolve(fit, checkpoint=source, state=_flat(fit.state))
    seen = {"system": config.system, "cameras": len(fit.cameras), "patches": source.sizes.patches}
    prompts = Prompts(**flow_fit.prompt_options(source, env, device), **seen)
    with torch.random.fork_rng(devices=[]):  # constructors of torch.nn draw numbers that are thrown away
        module = _module(config, context, fit, prompts.image_token).to(device)
    images = CroppedImages(source.sizes.image_size, device, dtype)
    return GrootPolicy(config, context, fit, module, images, device, prompts=prompts, gripper=config.gripper)


def _flat(scale: Scale | None) -> Any:
    return scale and evolve(scale, flat=True)


def _preset(config: GrootConfig, context: Context, env: EnvInfo) -> flow_fit.Fit:
    """Random weights, no padding but of small states."""
    sees = flow_fit.uses_state(config.use_state, env)
    shape = Shape(horizon=context.chunk, action_dim=env.action_dim, state_dim=max(env.state_dim, 1))
    scales = flow_fit.measured(context, quantiles=True) or flow_fit.preset_statistics(context, env, sees)
    if scales.state is not None and not scales.state.values:  # as it is, in the layout's words
        ends = ((-1.0,) * env.state_dim, (1.0,) * env.state_dim)
        scales = evolve(scales, state=Scale(mode="MIN_MAX", values=ends, dim=env.state_dim))
    checkpoint = GrootCheckpoint(
        sizes=TINY,
        shape=shape,
        statistics=scales,
        tokenizer=_small_tokenizer(config, env),
        raw={},
        config=_written(shape),
        slots=SLOTS,
        robot=Robot(tag="new_embodiment", statistics=scales, cameras=()),
    )
    return flow_fit.fit_preset("gr00t", config, env, checkpoint, sees)


def _written(shape: Shape) -> dict[str, Any]:
    """config.json of a preset."""
    head = {"action_horizon": shape.horizon, "action_dim": shape.action_dim, "max_state_dim": shape.state_dim}
    return {"model_type": MODEL_TYPE, "architectures": ["GR00T_N1_5"], HEAD: head}


def _small_tokenizer(config: GrootConfig, env: EnvInfo) -> Tokenizer:
    """A few words, and the tokens that a chat with images needs."""
    chat = f"system\n{config.system}\nuser\n<image 1><image 2>"
    instructions = (task.instruction for task in env.tasks)
    tokenizer = train_tokenizer(instructions, lambda text: f"{chat}{text}\nassistant\n", TINY.vocab - len(SPECIAL))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _fit(config: GrootConfig, context: Context, env: EnvInfo) -> flow_fit.Fit:
    assert config.checkpoint is not None
    folder = resolve(config.checkpoint, WANTED)
    raw = read_config(folder)
    robot, head, own = read_robot(folder, config), raw[HEAD], folder / ARCHITECTURE
    widths = {"action_dim": head.get("action_dim", 32), "state_dim": head.get("max_state_dim", 64)}
    file = find_tokenizer(folder, config.tokenizer)
    checkpoint = GrootCheckpoint(
        sizes=read_file(own, lambda path: Sizes(**read_json(path))) if own.is_file() else Sizes(),
        shape=Shape(horizon=horizon(raw), **widths),
        statistics=robot.statistics,
        tokenizer=read_file(file, lambda path: Tokenizer.from_file(str(path))),
        raw={},
        config=raw,
        slots=max(SLOTS, len(robot.cameras)),
        folder=folder,
        weights=find_weights(folder, network.open_names),
        processors={METADATA: (folder / METADATA).read_bytes()},
        robot=robot,
    )
    logger.warning(
        "the prompt of GR00T N1.5 and its tokenizer could not be compared with the original's; if %s does not act as "
        "published, look at model.system and at how state and action were scaled (docs/models/gr00t.md)",
        folder,
    )
    return flow_fit.fit_checkpoint("gr00t", config, context, env, checkpoint, config.use_state, quantiles=True)


def _module(config: GrootConfig, context: Context, fit: flow_fit.Fit, image_token: int) -> network.GrootModule:
    """Weights from the folder, or random ones that depend on the seed alone."""
    source, sizes, shape = fit.checkpoint, fit.checkpoint.sizes, fit.checkpoint.shape
    assert isinstance(source, GrootCheckpoint)
    groot = network.empty_network(sizes, shape)
    rules = {"public_name": network.public_name, "stays_float32": network.stays_float32}
    flow_fit.give_weights("gr00t", config, context, source, groot, network.initialise, **rules)
    heads = flow_fit.make_heads(
        "gr00t", config, config.value_head, context, source, sizes.output, sizes.text_width + sizes.width
    )
    if config.train_expert_only:
        groot.backbone.requires_grad_(False)
    if fit.state is None:  # its input is zero
        groot.action_head.state_encoder.layer1.W.requires_grad_(False)
    flow_fit.add_adapters("gr00t", config, context, groot)
    return network.GrootModule(groot, (shape.horizon, shape.action_dim), source.robot.row, image_token, *heads)
