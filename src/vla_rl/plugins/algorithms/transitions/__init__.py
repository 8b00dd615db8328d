"""`transitions`: computes nothing itself; hands the collected data to a trainer of transitions."""

from __future__ import annotations

from vla_rl.core.declarations import AlgorithmPlugin

plugin = AlgorithmPlugin(
    config="vla_rl.toolkit.no_settings:NoSettings",
    build="vla_rl.plugins.algorithms.transitions.impl:TransitionFields",
    summary="no policy gradient: all transitions go to an off-policy trainer (the default with one)",
)
