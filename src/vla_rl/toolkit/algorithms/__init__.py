"""Building blocks of algorithms. Each name is loaded on first use, so settings can be read without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_rl.toolkit.algorithms.functional import (
        clipped_surrogate,
        gae,
        group_advantages,
        kl_estimate,
        loss_weights,
        reduce_tokens,
        weighted_sum,
    )
    from vla_rl.toolkit.algorithms.policy_gradient import trajectory_scores

__all__ = [
    "clipped_surrogate",
    "gae",
    "group_advantages",
    "kl_estimate",
    "loss_weights",
    "reduce_tokens",
    "trajectory_scores",
    "weighted_sum",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "policy_gradient" if name == "trajectory_scores" else "functional"
    return getattr(import_module(f"{__name__}.{module}"), name)
