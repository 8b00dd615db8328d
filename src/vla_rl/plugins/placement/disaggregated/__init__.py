"""Disaggregated placement: each role on its own devices."""

from __future__ import annotations

from vla_rl.core.declarations import PlacementPlugin

plugin = PlacementPlugin(
    config="vla_rl.plugins.placement.disaggregated.config:DisaggregatedConfig",
    build="vla_rl.plugins.placement.disaggregated.impl:Disaggregated",
    summary="each role on separate devices",
)
