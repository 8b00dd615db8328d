"""Collocated placement: every worker steps envs, runs the policy and trains, with one copy of the weights."""

from __future__ import annotations

from vla_rl.core.declarations import PlacementPlugin

plugin = PlacementPlugin(
    config="vla_rl.plugins.placement.collocated.config:CollocatedConfig",
    build="vla_rl.plugins.placement.collocated.impl:Collocated",
    summary="all roles in every worker, one copy of the weights",
)
