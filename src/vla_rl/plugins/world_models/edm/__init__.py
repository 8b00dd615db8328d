"""`edm`: a diffusion world model (EDM, as in DIAMOND) that predicts the next frames. See
docs/reference/world-models.md."""

from __future__ import annotations

from vla_rl.core.declarations import WorldModelPlugin

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
PRESETS = {"diamond": {}, "tiny": TINY}
"""`diamond`: the sizes of the paper, which are the defaults. `tiny`: trains on two CPU cores."""

plugin = WorldModelPlugin(
    config="vla_rl.plugins.world_models.edm.config:EDMConfig",
    build="vla_rl.plugins.world_models.edm.model:EDM",
    summary="Experimental: frames by diffusion (DIAMOND)",
    presets=PRESETS,
)
