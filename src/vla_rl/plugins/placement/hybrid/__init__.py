"""Hybrid placement: simulators and policies on separate devices at the same time, learners on all devices."""

from __future__ import annotations

from vla_rl.core.declarations import PlacementPlugin

plugin = PlacementPlugin(
    config="vla_rl.plugins.placement.hybrid.config:HybridConfig",
    build="vla_rl.plugins.placement.hybrid.impl:Hybrid",
    summary="simulators and policies as a pipeline, learners on all",
)
