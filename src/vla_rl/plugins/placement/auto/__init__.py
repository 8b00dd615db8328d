"""Automatic placement: measures the roles, then takes the split of devices with the shortest predicted iteration."""

from __future__ import annotations

from vla_rl.core.declarations import PlacementPlugin

plugin = PlacementPlugin(
    config="vla_rl.plugins.placement.auto.config:AutoConfig",
    build="vla_rl.plugins.placement.auto.impl:Auto",
    summary="measures the roles, then takes the fastest split of devices",
)
