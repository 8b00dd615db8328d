"""The six models with blocks, in their smallest sizes, for tests of compiled and captured acting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import gr00t_cases
import openvla_cases
import pi0_cases
from openvla_cases import ENV

from vla_rl.core.contexts import ModelContext
from vla_rl.core.types import Observation
from vla_rl.plugins.models.openvla import openvla
from vla_rl.plugins.models.openvla.config import OpenVLAARConfig
from vla_rl.plugins.models.pi0 import pi05
from vla_rl.plugins.models.pi0.config import Pi05Config
from vla_rl.plugins.models.smolvla import plugin as smolvla
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.testing import synthetic
from vla_rl.toolkit.models.adapters import LoRAConfig

LONG = "put the yellow cube into the basket behind the red bowl and close the drawer"
"""Instruction that no model was built with: it makes all prompts longer."""


def context(**changes: Any) -> ModelContext:
    return ModelContext(**{"env": ENV, "chunk": 2, "values": "chunk", **changes})


MODELS: Mapping[str, Callable[[], Any]] = {
    "openvla_oft": lambda: openvla_cases.policy(context={"chunk": 2, "values": "chunk"}),
    "openvla": lambda: openvla.build(OpenVLAARConfig(preset="fast"), context(chunk=1)),
    "pi0": lambda: pi0_cases.policy(context={"chunk": 2, "values": "chunk"}, train_expert_only=False),
    "pi05": lambda: pi05.build(Pi05Config(preset="tiny"), context()),
    "smolvla": lambda: smolvla.build(SmolVLAConfig(preset="tiny"), context()),
    "gr00t": lambda: gr00t_cases.policy(context={"chunk": 2, "values": "chunk"}),
}
SPECIAL: Mapping[str, Callable[[], Any]] = {
    "openvla_oft with adapters and checkpointing": lambda: openvla_cases.policy(
        context={"chunk": 2, "values": "chunk"}, lora=LoRAConfig(rank=2), recompute="full"
    ),
    "openvla_oft with adapters and selective recomputation": lambda: openvla_cases.policy(
        context={"chunk": 2, "values": "chunk"}, lora=LoRAConfig(rank=2), recompute="selective"
    ),
    "openvla_oft with adapters and int8": lambda: openvla_cases.policy(
        context={"chunk": 2, "values": "chunk"}, lora=LoRAConfig(rank=2), frozen_weights="int8"
    ),
    "openvla_oft with adapters, selective recomputation and nf4": lambda: openvla_cases.policy(
        context={"chunk": 2, "values": "chunk"}, lora=LoRAConfig(rank=2), recompute="selective", frozen_weights="nf4"
    ),
    "pi0 with a frozen backbone and nf4": lambda: pi0_cases.policy(
        context={"chunk": 2, "values": "chunk"}, frozen_weights="nf4"
    ),
    "gr00t N1.7": lambda: gr00t_cases.policy(preset="tiny_n1_7", context={"chunk": 2, "values": "chunk"}),
}


def observation(rows: int, instruction: str | None = None) -> Observation:
    """Observations of two tasks in turn, or all with this instruction."""
    obs = synthetic.observation(ENV, rows)
    return obs if instruction is None else attrs.evolve(obs, instructions=(instruction,) * rows)
