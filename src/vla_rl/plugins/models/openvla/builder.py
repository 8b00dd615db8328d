"""From a spec's config and a place in the run to a policy; everything that cannot fit is refused here."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from tokenizers import Tokenizer

from vla_rl.core.errors import UserError
from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import Context, EnvInfo
from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig, preset_config
from vla_rl.plugins.models.openvla.checkpoint import (
    VALUE_HEAD,
    Checkpoint,
    load_weights,
    open_checkpoint,
    read_network,
    read_proprio,
    read_value_head,
)
from vla_rl.plugins.models.openvla.codec import ActionCodec, Scale, Scaler
from vla_rl.plugins.models.openvla.config import OpenVLAOFTConfig
from vla_rl.plugins.models.openvla.heads import OFTModule, ProprioProjector, ValueHead
from vla_rl.plugins.models.openvla.images import ImageProcessor
from vla_rl.plugins.models.openvla.lora import add_adapters
from vla_rl.plugins.models.openvla.modeling import empty_model, initialise
from vla_rl.plugins.models.openvla.policy import OFTPolicy
from vla_rl.plugins.models.openvla.prompts import Prompts, train_tokenizer


class MismatchError(UserError, ValueError):
    """Model and simulator do not fit each other."""


@frozen(kw_only=True)
class Fit:
    """What model, simulator and spec agree on."""

    config: OpenVLAConfig
    tokenizer: Tokenizer
    cameras: tuple[str, ...]
    chunk: int
    action: Scale
    state: Scale | None
    stop: bool


def build_policy(config: OpenVLAOFTConfig, context: Context) -> OFTPolicy:
    """Raises ValueError (CheckpointError, MismatchError) when checkpoint, spec and simulator do not fit."""
    if context.env is None:
        raise MismatchError("openvla_oft is built for a simulator: Context.env is needed")
    checkpoint = None if config.checkpoint is None else open_checkpoint(config.checkpoint)
    if checkpoint is None:
        fit = _preset(config, context, context.env)
    else:
        fit = _fit(checkpoint, config, context, context.env)
    device, dtype = torch.device(context.device), getattr(torch, config.dtype)
    with torch.random.fork_rng(devices=[]):  # constructors of torch.nn draw numbers that are thrown away
        module = _module(config, context, fit, checkpoint, dtype).to(device)
    fit.config.policy_setup = {
        "cameras": list(fit.cameras),
        "chunk": fit.chunk,
        "state_dim": 0 if fit.state is None else len(fit.state.q01),
        "append_stop_token": fit.stop,
    }
    return OFTPolicy(
        module=module,
        config=fit.config,
        codec=ActionCodec(fit.action, fit.config.action_vocab_end, fit.config.n_action_bins, device),
        prompts=Prompts(
            fit.tokenizer,
            placeholders=fit.chunk * len(fit.action.q01),
            append_stop_token=fit.stop,
            pad_id=fit.config.pad_token_id,
            device=device,
            instructions=[task.instruction for task in context.env.tasks],
        ),
        images=ImageProcessor(fit.config, device, dtype, config.center_crop),
        state_scaler=None if fit.state is None else Scaler(fit.state, device),
        cameras=fit.cameras,
        chunk=fit.chunk,
        temperature=context.temperature,
        device=device,
        dtype=dtype,
    )


def _preset(config: OpenVLAOFTConfig, context: Context, env: EnvInfo) -> Fit:
    """Random weights: actions scaled by the simulator's bounds, the state as it is."""
    sizes = preset_config(config.preset or "tiny")
    action = Scale.between(env.action_low, env.action_high)
    use_state = env.state_dim > 0 if config.use_proprio is None else config.use_proprio
    state = Scale.identity(_state_dim(env)) if use_state else None
    entry: dict[str, Any] = {"action": action.entry()}
    if state is not None:
        entry["proprio"] = state.entry()
    sizes.norm_stats = {config.unnorm_key or "simulator": entry}
    return Fit(
        config=sizes,
        tokenizer=train_tokenizer((task.instruction for task in env.tasks), sizes),
        cameras=_cameras(config, env, {}),
        chunk=context.chunk,
        action=action,
        state=state,
        stop=config.append_stop_token is not False,
    )


def _fit(checkpoint: Checkpoint, config: OpenVLAOFTConfig, context: Context, env: EnvInfo) -> Fit:
    setup = checkpoint.setup
    key, entry = checkpoint.statistics(config.unnorm_key)
    if "action" not in entry:
        raise MismatchError(f"statistics {key!r} of {checkpoint.folder} have no entry 'action'")
    action = Scale.read(entry["action"])
    if len(action.q01) != env.action_dim:
        raise MismatchError(
            f"statistics {key!r} of {checkpoint.folder} are for {len(action.q01)}-dimensional actions, "
            f"the simulator takes {env.action_dim}"
        )
    if setup.get("chunk", context.chunk) != context.chunk:
        raise MismatchError(
            f"{checkpoint.folder} was trained for chunks of {setup['chunk']} actions, "
            f"the spec asks for {context.chunk}; set rollout.chunk to {setup['chunk']}"
        )
    use_state = checkpoint.proprio_file is not None if config.use_proprio is None else config.use_proprio
    state = None
    if use_state:
        if "proprio" not in entry:
            raise MismatchError(f"use_proprio needs statistics of the state; {key!r} of {checkpoint.folder} has none")
        state = Scale.read(entry["proprio"])
        if len(state.q01) != _state_dim(env):
            raise MismatchError(
                f"{checkpoint.folder} was trained on a {len(state.q01)}-dimensional state, "
                f"the simulator's has {env.state_dim} dimensions"
            )
    stop = config.append_stop_token
    return Fit(
        config=checkpoint.config,
        tokenizer=checkpoint.tokenizer,
        cameras=_cameras(config, env, setup),
        chunk=context.chunk,
        action=action,
        state=state,
        stop=bool(setup.get("append_stop_token", True)) if stop is None else stop,
    )


def _state_dim(env: EnvInfo) -> int:
    if env.state_dim == 0:
        raise MismatchError("use_proprio needs a state, and this simulator has none; set use_proprio: false")
    return env.state_dim


def _cameras(config: OpenVLAOFTConfig, env: EnvInfo, setup: dict[str, Any]) -> tuple[str, ...]:
    there, trained = tuple(env.cameras), tuple(setup.get("cameras", ()))
    chosen = config.cameras or (trained if trained and set(trained) <= set(there) else there)
    unknown = [name for name in chosen if name not in there]
    if unknown:
        raise MismatchError(f"no camera {', '.join(unknown)} in this simulator; it has: {', '.join(there) or 'none'}")
    if not chosen:
        raise MismatchError("openvla_oft needs at least one camera, and this simulator has none")
    if trained and len(trained) != len(chosen):
        raise MismatchError(
            f"the checkpoint was trained with {len(trained)} cameras ({', '.join(trained)}), the policy would see "
            f"{len(chosen)} ({', '.join(chosen)}); name the right ones in model.cameras"
        )
    return chosen


def _module(
    config: OpenVLAOFTConfig, context: Context, fit: Fit, checkpoint: Checkpoint | None, dtype: torch.dtype
) -> OFTModule:
    """Weights from the folder, or random ones that depend on the seed alone. The critic stays in float32."""
    vla = empty_model(fit.config)
    width = fit.config.text_config.hidden_size
    projector = None if fit.state is None else ProprioProjector(len(fit.state.q01), width)
    if projector is not None:
        initialise(projector, derived_seed(context.seed, "openvla/proprio"))
    if checkpoint is None:
        initialise(vla, derived_seed(context.seed, "openvla/network"))
    else:
        load_weights(vla, read_network(checkpoint), checkpoint.folder)
        if projector is not None and checkpoint.proprio_file is not None:
            load_weights(projector, read_proprio(checkpoint.proprio_file), checkpoint.proprio_file)
    for part in (vla, projector):
        for parameter in part.parameters() if part is not None else ():
            parameter.data = parameter.data.to(dtype)  # buffers (rotary frequencies) keep float32
    if config.freeze_vision:
        vla.vision_backbone.requires_grad_(False)
    module = OFTModule(vla, projector, _value_head(config, context, width, checkpoint))
    if config.lora is not None:
        module.vla = add_adapters(vla, config.lora, config.freeze_vision, derived_seed(context.seed, "openvla/lora"))
    if config.gradient_checkpointing:
        vla.activation_checkpointing_enable({"use_reentrant": False})
    return module


def _value_head(
    config: OpenVLAOFTConfig, context: Context, width: int, checkpoint: Checkpoint | None
) -> ValueHead | None:
    if context.values == "none":
        return None
    outputs = context.chunk if context.values == "action" else None
    options = config.value_head
    head = ValueHead(width, options.hidden, outputs, options.detach, derived_seed(context.seed, "openvla/value_head"))
    saved = None if checkpoint is None else read_value_head(checkpoint.folder)
    if checkpoint is not None and saved is not None:
        load_weights(head, saved, checkpoint.folder / VALUE_HEAD, "; remove the file to start with a new critic")
    return head
