"""`oracle`: the true simulator used as a world model.

See docs/reference/world-models.md.
"""

from __future__ import annotations

from vla_rl.core.declarations import WorldModelPlugin

plugin = WorldModelPlugin(
    config="vla_rl.plugins.world_models.oracle.config:OracleConfig",
    build="vla_rl.plugins.world_models.oracle.model:make_oracle",
    summary="Experimental: the true simulator, which plays recorded actions again; an upper bound, and for tests",
)
