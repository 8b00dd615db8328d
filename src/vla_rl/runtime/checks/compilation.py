"""Check of `train.compile` and `rollout.compile` against devices and placement."""

from __future__ import annotations

from collections.abc import Collection

from vla_rl.core.contexts import Role
from vla_rl.core.spec.source import Item
from vla_rl.core.spec.spec import Spec


def role_of_model(roles: Collection[str]) -> Role:
    """Return `PolicyContext.role` of the model in a worker with these roles."""
    if "learner" not in roles:
        return "act"
    return "both" if "policy" in roles else "learn"


def compilation_problem(spec: Spec, device: str, role: Role, moves: bool = False) -> Item | None:
    """Return why a worker's model cannot be compiled as the spec asks, whatever the model is.

    Args:
        role: as in `PolicyContext`.
        moves: the weights leave the device between phases (offload).
    """
    learning, acting = spec.train.compile, spec.rollout.compile
    if role == "both" and learning is not None and acting is not None and (learning == "off") != (acting == "off"):
        return ("train", "compile"), (
            f"{learning} and rollout.compile: {acting} contradict each other in a worker that learns and acts with one "
            f"model; leave one of them out, or place the policy in separate workers"
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
