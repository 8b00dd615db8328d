"""Compilation of a worker's model, as `train.compile` and `rollout.compile` say."""

from __future__ import annotations

from typing import Literal

import torch

from vla_rl.core.capabilities import Capturable, Compilable
from vla_rl.core.contexts import Role
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.manager import unwrap_component
from vla_rl.core.spec.spec import Spec
from vla_rl.core.spec.yaml import dotted_path
from vla_rl.runtime.checks.compilation import compilation_problem
from vla_rl.toolkit.models.acting.compilation import CompiledBlocks
from vla_rl.toolkit.models.acting.cuda_graphs import CapturedFunction, CudaGraphRecorder
from vla_rl.toolkit.models.adapters import merge_state

Mode = Literal["off", "blocks", "graphs"]


def compilation_mode(spec: Spec, device: str, role: Role, moves: bool = False) -> Mode | None:
    """Return how a worker's model is compiled; None: its layers decide. Arguments are those of `compilation_problem`.
    Raises UserError for settings that contradict each other, the device or the placement."""
    problem = compilation_problem(spec, device, role, moves)
    if problem is not None:
        raise UserError(f"{dotted_path(problem[0])}: {problem[1]}")
    learning, acting = spec.train.compile, spec.rollout.compile
    mode: Mode | None = {"learn": learning, "act": acting, "both": acting or learning}[role]
    sharded = role != "act" and spec.train.sharding == "full"
    if mode is None and (sharded or not device.startswith("cuda")):
        return "off"
    return mode


def compile_model(
    spec: Spec, model: VLAModel, device: str, role: Role, *, moves: bool = False
) -> CompiledBlocks | None:
    """Have blocks compiled and decisions captured when first called. Return the blocks; None if nothing is compiled.

    Raises UserError where the model cannot be compiled as the spec asks.

    Arguments are those of `compilation_problem`.
    """
    mode = compilation_mode(spec, device, role, moves)
    component = unwrap_component(model)
    captures = isinstance(model, Capturable)
    if mode == "off" or (mode is None and not isinstance(model, Compilable)):
        return None
    if not isinstance(model, Compilable):
        raise UserError(f"model {spec.model.type!r} names no layers to compile; set compile: off")
    if mode == "graphs":
        if not captures:
            raise UserError(
                f"model {spec.model.type!r} has no part that a CUDA graph could capture; set rollout.compile: blocks"
            )
        component.decide = CapturedFunction(
            component.decide, CudaGraphRecorder(torch.device(device)), state=merge_state(component.module)
        )
    return CompiledBlocks(component.module, component.blocks, regions=component.regions, policy=component)
