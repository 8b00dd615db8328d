"""Matches checkpoint, simulator and spec, and refuses what does not fit."""

from __future__ import annotations

import math
from typing import Any

from attrs import frozen
from tokenizers import Tokenizer

from vla_rl.core.contexts import ModelContext
from vla_rl.core.types import EnvInfo
from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig, preset_config
from vla_rl.plugins.models.openvla.checkpoint import OpenVLACheckpoint, open_checkpoint
from vla_rl.plugins.models.openvla.checks import PLUGINS, check_decoding, check_head, check_parts, find_decoding
from vla_rl.plugins.models.openvla.codec import ActionScale
from vla_rl.plugins.models.openvla.config import RANGES, FamilyConfig, OpenVLAARConfig, OpenVLAOFTConfig, no_rl
from vla_rl.plugins.models.openvla.prompts import train_tokenizer
from vla_rl.plugins.models.openvla.statistics import check_suites, choose_range, choose_statistics
from vla_rl.toolkit.models.checkpoints.fitting import (
    MismatchError,
    check_action_dim,
    check_action_range,
    check_camera_count,
    check_state_dim,
    choose_cameras,
    require_state,
)


@frozen(kw_only=True)
class OpenVLAIOAdapter:
    """Resolved inputs and outputs on which model, simulator and spec agree."""

    checkpoint: OpenVLACheckpoint | None
    config: OpenVLAConfig
    tokenizer: Tokenizer
    cameras: tuple[str, ...]
    chunk: int
    action: ActionScale
    state: ActionScale | None
    stop: bool
    statistics_range: str = "q01_q99"
    """Statistics in use, a name of RANGES."""

    @property
    def token_count(self) -> int:
        """Number of action tokens of a chunk."""
        return self.chunk * len(self.action.q01)


def find_fit(config: FamilyConfig, context: ModelContext) -> OpenVLAIOAdapter:
    """Return the resolved inputs and outputs. Raise CheckpointError or MismatchError when checkpoint, spec and
    simulator do not fit."""
    env = context.env
    if isinstance(config, OpenVLAOFTConfig) and no_rl(config) and context.values != "none":
        raise MismatchError(
            "the algorithm asks for a critic, and openvla_oft with `head: l1` cannot be trained by RL: it gives no "
            "distribution over actions; set `deviation: {}`, or use `head: discrete` and a checkpoint trained so"
        )
    if config.checkpoint is None:
        return _fit_preset(config, context, env)
    return _fit_checkpoint(open_checkpoint(config.checkpoint), config, context, env)


def over_full_vocabulary(config: FamilyConfig) -> bool:
    """Return whether text tokens are scored too, so that the head needs all its rows."""
    return isinstance(config, OpenVLAARConfig) and config.log_prob_over == "full_vocabulary"


def _name_plugin(config: FamilyConfig) -> str:
    return PLUGINS[find_decoding(config)]


def _fit_preset(config: FamilyConfig, context: ModelContext, env: EnvInfo) -> OpenVLAIOAdapter:
    """Return a preset: random weights, actions scaled by the simulator's bounds, the state unchanged."""
    sizes = preset_config(config.preset or "tiny")
    measured = _read_measured(config, context)
    action = (
        ActionScale.from_entry(measured["action"])
        if measured
        else ActionScale.from_bounds(env.action_low, env.action_high)
    )
    state = None
    stop = True
    if isinstance(config, OpenVLAOFTConfig):
        use_state = env.state_dim > 0 if config.use_proprio is None else config.use_proprio
        if use_state:
            require_state(env, "use_proprio")
            state = (
                ActionScale.from_entry(measured["proprio"]) if measured else ActionScale.identity_scale(env.state_dim)
            )
        stop = config.append_stop_token is not False
    entry: dict[str, Any] = {"action": action.to_entry()}
    if state is not None:
        entry["proprio"] = state.to_entry()
    sizes.norm_stats = {config.unnorm_key or "simulator": entry}
    return OpenVLAIOAdapter(
        checkpoint=None,
        config=sizes,
        tokenizer=train_tokenizer((task.instruction for task in env.tasks), sizes),
        cameras=_select_cameras(config, env, {}),
        chunk=context.chunk,
        action=action,
        state=state,
        stop=stop,
    )


def _fit_checkpoint(
    checkpoint: OpenVLACheckpoint, config: FamilyConfig, context: ModelContext, env: EnvInfo
) -> OpenVLAIOAdapter:
    measured = _read_measured(config, context)
    if measured:
        checkpoint.config.norm_stats = {config.unnorm_key or "demonstrations": measured}
        key, entry = next(iter(checkpoint.config.norm_stats.items()))
    else:
        key, entry = choose_statistics(checkpoint.folder, checkpoint.known, config.unnorm_key)
        check_suites(checkpoint.folder, checkpoint.known, key, context.suites)
    setup = checkpoint.config.policy_setup
    span = choose_range(checkpoint.folder, key, entry, {"statistics_range": "q01_q99"} if measured else setup, config)
    action = _read_scale(checkpoint, key, entry, "action", span)
    check_action_dim(f"statistics {key!r} of {checkpoint.folder} are", len(action.q01), env)
    known = checkpoint.config.norm_stats
    check_action_range(
        f"statistics {key!r} of {checkpoint.folder}",
        list(zip(action.q01, action.q99, strict=True)),
        env,
        gripper="model.gripper: rlds",
        converts=config.gripper != "keep",
        remedy=f"; set model.unnorm_key to one that fits: {', '.join(known)}" if len(known) > 1 else "",
    )
    check_decoding(checkpoint.folder, setup, config, context.chunk)
    check_head(checkpoint.folder, checkpoint.action_head_file, config)
    check_parts(checkpoint.folder, config)
    state = None
    stop = True
    if isinstance(config, OpenVLAOFTConfig):
        state = _read_state_scale(checkpoint, config, env, key, entry, span)
        recorded = bool(setup.get("append_stop_token", True))
        stop = recorded if config.append_stop_token is None else config.append_stop_token
    return OpenVLAIOAdapter(
        checkpoint=checkpoint,
        config=checkpoint.config,
        tokenizer=checkpoint.tokenizer,
        cameras=_select_cameras(config, env, setup),
        chunk=context.chunk,
        action=action,
        state=state,
        stop=stop,
        statistics_range=span,
    )


def _read_measured(config: FamilyConfig, context: ModelContext) -> dict[str, Any]:
    """Return the demonstrations' statistics, in a checkpoint's form, if the run scales by them; else an empty dict."""
    scaling = context.scaling
    if scaling is None:
        return {}
    entry: dict[str, Any] = {"action": {name: list(values) for name, values in scaling["action"].items()}}
    if config.gripper != "keep":  # the codec maps the simulator's -1 and 1 to 1 and 0, which are not scaled
        entry["action"]["mask"] = [True] * (len(entry["action"]["q01"]) - 1) + [False]
    if "state" in scaling:
        entry["proprio"] = {name: list(values) for name, values in scaling["state"].items()}
    return entry


def _read_scale(checkpoint: OpenVLACheckpoint, key: str, entry: dict[str, Any], part: str, span: str) -> ActionScale:
    """Return a scale of actions or state. Raise MismatchError for statistics that cannot scale: they would give NaN, or
    inverted actions."""
    where = f"statistics {key!r} of {checkpoint.folder}"
    if part not in entry:
        raise MismatchError(f"{where} have no entry {part!r}")
    ends = RANGES[span]
    absent = [name for name in ends if name not in entry[part]]
    if absent:
        raise MismatchError(f"{where}: {part} has no {' and no '.join(absent)}; it has: {', '.join(entry[part])}")
    scale = ActionScale.from_entry(entry[part], ends)
    for i, (low, high) in enumerate(zip(scale.q01, scale.q99, strict=True)):
        if not math.isfinite(low) or not math.isfinite(high) or low > high:
            raise MismatchError(
                f"{where}: {part}[{i}] ranges from {low} ({ends[0]}) to {high} ({ends[1]}), which is not a range"
            )
    return scale


def _read_state_scale(
    checkpoint: OpenVLACheckpoint, config: OpenVLAOFTConfig, env: EnvInfo, key: str, entry: dict[str, Any], span: str
) -> ActionScale | None:
    use_state = checkpoint.proprio_file is not None if config.use_proprio is None else config.use_proprio
    if not use_state:
        return None
    if "proprio" not in entry:
        raise MismatchError(f"use_proprio needs statistics of the state; {key!r} of {checkpoint.folder} has none")
    state = _read_scale(checkpoint, key, entry, "proprio", span)
    require_state(env, "use_proprio")
    check_state_dim(f"{checkpoint.folder} was trained", len(state.q01), env)
    return state


def _select_cameras(config: FamilyConfig, env: EnvInfo, setup: dict[str, Any]) -> tuple[str, ...]:
    available, trained = tuple(env.cameras), tuple(setup.get("cameras", ()))
    single = find_decoding(config) == "autoregressive"
    chosen = choose_cameras(_name_plugin(config), env, config.cameras, trained, available[:1] if single else available)
    check_camera_count(trained, chosen)
    if single and not trained and config.checkpoint is not None and len(chosen) > 1:
        raise MismatchError(
            f"OpenVLA was trained on one image, model.cameras names {len(chosen)} ({', '.join(chosen)}); name one"
        )
    return chosen
