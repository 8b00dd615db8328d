"""What is known of model and simulator before they are built: sizes and descriptions (planning/hardware.yaml)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from vla_rl.core.catalogue import load
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.runtime.planning.hardware import SimulatorRates, read_hardware

READS_CHECKPOINT = (
    *("tokenizer", "asset_id", "statistics_range", "unnorm_key", "embodiment"),
    *("state_keys", "action_keys"),
)
"""Keys of models that say how to read a checkpoint, and that a preset does not take."""


def of_public_size(spec: Spec, guesses: list[str]) -> Spec:
    """Return the spec with random weights of the public size in place of a checkpoint that is not on this machine."""
    config = spec.model.config
    checkpoint = getattr(config, "checkpoint", None)
    if checkpoint is None or checkpoint.startswith("builtin:") or os.path.exists(checkpoint):  # noqa: PTH110 - as given
        return spec
    guesses.append(f"{checkpoint} is not on this machine: sizes of `preset: full`")
    read = {name: None for name in READS_CHECKPOINT if hasattr(config, name)}
    plain = {"save_lora": "merged"} if hasattr(config, "save_lora") else {}
    return evolve(
        spec, model=evolve(spec.model, config=evolve(config, checkpoint=None, preset="full", **read, **plain))
    )


def known_info(spec: Spec, guesses: list[str]) -> EnvInfo:
    """Return the simulator's description as its plugin or `planning/hardware.yaml` has it. UserError for neither."""
    name, config = spec.env.type, spec.env.config
    plugin = load("env", name, spec.plugins)
    if plugin.env_info is not None:
        return plugin.env_info(config)
    rates = read_hardware().simulators.get(name)
    if rates is None:
        raise UserError(f"nothing is known of env {name!r} before it is built; plan with --profile RUN/trace.json")
    cameras = config.cameras
    if isinstance(cameras, Mapping):
        own = rates.image or (224, 224)
        sizes = {camera: own if size is None else (size, size) for camera, size in cameras.items()}
    else:
        assert rates.image is not None
        sizes = dict.fromkeys(cameras, rates.image)
    limit = spec.rollout.max_steps or _step_limit(config, rates)
    dimension = (plugin.action_dim(config) if plugin.action_dim else None) or rates.action_dim
    return EnvInfo(
        cameras=sizes,
        state_dim=rates.state_dim,
        action_low=(-1.0,) * dimension,
        action_high=(1.0,) * dimension,
        tasks=(TaskInfo(name="any", instruction=rates.instruction, max_steps=limit),),
    )


def _step_limit(config: Any, rates: SimulatorRates) -> int:
    """Return the step limit of the simulator's longest suite."""
    if getattr(config, "step_limits", None) == "simplevla" and rates.simplevla_max_steps is not None:
        return rates.simplevla_max_steps
    suites = getattr(config, "suites", None) or [getattr(config, "suite", None)]
    own = getattr(config, "max_steps", None)
    longest = max(rates.max_steps.values())
    return own or max(rates.max_steps.get(suite or "default", longest) for suite in suites)
