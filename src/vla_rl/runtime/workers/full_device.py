"""The error of a GPU that is full: how much is taken and by whom, and which keys of the spec need less."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vla_rl.core.errors import UserError

GIB = 2**30
ADVICE: Mapping[str, str] = {
    "learner": "lower train.micro_batch, set model.recompute to selective or full, or train adapters (model.lora)",
    "policy": "lower env.num_envs, or set rollout.compile to blocks if it is graphs",
    "sim": "lower env.num_envs, or place the simulators on CPUs (placement: sim: cpu)",
}
"""Role -> what needs less memory of its device."""
ALWAYS = (
    "let roles leave the device between phases (placement.offload), or give them separate devices; `vla-rl check "
    "SPEC --devices N --gpu-memory GIB` predicts what a run needs"
)


def is_full_device(error: BaseException) -> bool:
    """Return whether an error says that a device has no memory left. A process that cannot even create its context
    gets an AcceleratorError instead of an OutOfMemoryError."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "CUDA" in str(error) and "out of memory" in str(error)


def full_device(error: BaseException, caller: str, role: str) -> UserError:
    """Return the error for users.

    Args:
        caller: what ran out of memory, such as "learner worker 0 (model 'openvla_oft')".
        role: "sim", "policy", "learner" or another one.
    """
    first_line = next((line for line in str(error).splitlines() if line), type(error).__name__)
    advice = "; ".join([*([ADVICE[role]] if role in ADVICE else ADVICE.values()), ALWAYS])
    return UserError(f"{caller} found its GPU full{_use_of_device()}: {first_line}\n  {advice}")


def _use_of_device() -> str:
    """Describe who has the memory of this process's device; empty where CUDA does not say."""
    try:
        if not torch.cuda.is_available():
            return ""
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()
    except RuntimeError:  # no context can be created either
        return ""
    others = max(0, total - free - own)
    return (
        f" ({torch.cuda.get_device_name()}, {total / GIB:.1f} GiB: {own / GIB:.1f} are this worker's, "
        f"{others / GIB:.1f} other processes' and CUDA's own, {free / GIB:.1f} free)"
    )
