"""vla-rl: train vision-language-action models by reinforcement learning."""

from vla_rl.core.hookspecs import Algorithm, Demonstrations, Placement, RunEvents, SimEnv, VLAModel, hookimpl
from vla_rl.core.types import Context, Plugin

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "Context",
    "Demonstrations",
    "Placement",
    "Plugin",
    "RunEvents",
    "SimEnv",
    "VLAModel",
    "hookimpl",
]
