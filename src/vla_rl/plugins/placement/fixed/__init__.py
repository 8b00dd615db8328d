"""Placements on devices that the spec names, or on equal shares of all: `collocated`, `disaggregated` and `hybrid`."""

from __future__ import annotations

from vla_rl.core.declarations import PlacementPlugin

collocated = PlacementPlugin(
    config="vla_rl.plugins.placement.fixed.config:CollocatedConfig",
    build="vla_rl.plugins.placement.fixed.impl:Collocated",
    summary="all roles in every worker, one copy of the weights",
)
disaggregated = PlacementPlugin(
    config="vla_rl.plugins.placement.fixed.config:DisaggregatedConfig",
    build="vla_rl.plugins.placement.fixed.impl:Disaggregated",
    summary="each role on separate devices",
)
hybrid = PlacementPlugin(
    config="vla_rl.plugins.placement.fixed.config:HybridConfig",
    build="vla_rl.plugins.placement.fixed.impl:Hybrid",
    summary="simulators and policies as a pipeline, learners on all",
)
