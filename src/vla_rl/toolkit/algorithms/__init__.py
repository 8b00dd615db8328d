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
    from vla_rl.toolkit.algorithms.groups import trajectory_scores

_MODULE_OF = {
    "clipped_surrogate": "functional",
    "gae": "functional",
    "group_advantages": "functional",
    "kl_estimate": "functional",
    "loss_weights": "functional",
    "reduce_tokens": "functional",
    "trajectory_scores": "groups",
    "weighted_sum": "functional",
}
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
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
