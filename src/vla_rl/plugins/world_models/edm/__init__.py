"""`edm`: a diffusion world model (EDM, as in DIAMOND) that predicts the next frames. See
docs/reference/world-models.md."""

from __future__ import annotations

from vla_rl.core.declarations import WorldModelPlugin

plugin = WorldModelPlugin(
    config="vla_rl.plugins.world_models.edm.config:EDMConfig",
    build="vla_rl.plugins.world_models.edm.model:EDM",
    summary="Experimental: frames by diffusion (DIAMOND)",
    presets="vla_rl.plugins.world_models.edm.config:PRESETS",
)
