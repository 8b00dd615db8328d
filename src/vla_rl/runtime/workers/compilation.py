"""Compilation of a worker's model, as `train.compile` and `rollout.compile` say."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.manager import unwrapped
from vla_rl.core.spec.source import Item
from vla_rl.core.spec.spec import Spec
from vla_rl.core.spec.yaml import dotted
from vla_rl.runtime.workers.models import Role
from vla_rl.toolkit.models.adapters import merge_state
from vla_rl.toolkit.models.compilation import CompiledBlocks
from vla_rl.toolkit.models.cuda_graphs import CapturedFunction, CudaGraphRecorder

Mode = Literal["off", "blocks", "graphs"]


def role_of_model(roles: Collection[str]) -> Role:
    """Return `Context.role` of the model in a worker with these roles."""
    if "learner" not in roles:
        return "act"
    return "both" if "policy" in roles else "learn"


def compilation_problem(spec: Spec, device: str, role: Role, moves: bool = False) -> Item | None:
    """Return why a worker's model cannot be compiled as the spec asks, whatever the model is.

    Args:
        role: as in `Context`.
        moves: the weights leave the device between phases (offload).
    """
    learning, acting = spec.train.compile, spec.rollout.compile
    if role == "both" and learning is not None and acting is not None and (learning == "off") != (acting == "off"):
        return ("train", "compile"), (
            f"{learning} and rollout.compile: {acting} contradict each other in a worker that learns and acts with one "
            f"model; leave one of them out, or place the policy in workers of its own"
        )
    obstacle = ""
    if role != "learn" and acting == "graphs":
        stay = "graphs needs weights that stay where they are, and"
        if not device.startswith("cuda"):
            obstacle = f"graphs needs CUDA, and the policy is on {device!r}; set rollout.compile: blocks or off"
        elif role == "both" and spec.train.sharding == "full":
            obstacle = f"{stay} train.sharding: full gathers and frees them; set blocks, or train.sharding: replicated"
        elif moves:
            obstacle = f"{stay} the placement offloads them; set blocks, or a placement without offload"
    return (("rollout", "compile"), obstacle) if obstacle else None


def compilation_mode(spec: Spec, device: str, role: Role, moves: bool = False) -> Mode | None:
    """Return how a worker's model is compiled; None: the spec leaves it open, and the model decides by its layers.
    Arguments are those of `compilation_problem`.

    Raises UserError for settings that contradict each other, the device or the placement.
    """
    problem = compilation_problem(spec, device, role, moves)
    if problem is not None:
        raise UserError(f"{dotted(problem[0])}: {problem[1]}")
    learning, acting = spec.train.compile, spec.rollout.compile
    mode: Mode | None = {"learn": learning, "act": acting, "both": acting or learning}[role]
    sharded = role != "act" and spec.train.sharding == "full"
    if mode is None and (sharded or not device.startswith("cuda")):
        return "off"
    return mode


def compile_model(
    spec: Spec, model: VLAModel, device: str, role: Role, *, moves: bool = False
) -> CompiledBlocks | None:
    """Let the model's blocks be compiled, and its decisions be captured, when they are first called. Return the blocks;
    None where nothing is compiled.

    Raises UserError where the model cannot be compiled as the spec asks.

    Arguments are those of `compilation_problem`.
    """
    mode = compilation_mode(spec, device, role, moves)
    component = unwrapped(model)
    if mode == "off" or (mode is None and not component.blocks):
        return None
    if not component.blocks:
        raise UserError(f"model {spec.model.type!r} names no layers to compile; set compile: off")
    if mode == "graphs":
        if component.decide is None:
            raise UserError(
                f"model {spec.model.type!r} has no part that a CUDA graph could capture; set rollout.compile: blocks"
            )
        component.decide = CapturedFunction(
            component.decide, CudaGraphRecorder(torch.device(device)), state=merge_state(component.module)
        )
    return CompiledBlocks(component.module, component.blocks, regions=component.regions, policy=component)
