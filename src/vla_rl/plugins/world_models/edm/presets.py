"""Presets of `edm`: settings under a name."""

from __future__ import annotations

from typing import Any

TINY = {
    "history": 2,
    "fold": 4,
    "channels": (48, 64, 96),
    "depths": (1, 1, 1),
    "condition": 128,
    "evaluations": 1,
    "residual": True,
    "sigma_loc": 1.6,  # one evaluation is at noise level 5 = exp(1.6), so only that level is trained
    "sigma_scale": 0.4,
    "changed_weight": 4.0,
    "lr": 1e-3,
    "heads_lr": 3e-3,
    "heads_weight_decay": 1.0,  # else the heads memorise the first few hundred episodes
    "warm_up": 30,
}
PRESETS: dict[str, dict[str, Any]] = {"diamond": {}, "tiny": TINY}
"""`diamond`: the sizes of the paper, which are the defaults. `tiny`: trains on two CPU cores."""
