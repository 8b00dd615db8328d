"""GIPO (AcceRL, arXiv:2603.18464): an actor-critic that damps off-policy samples with Gaussian trust weights instead of
clipping them."""

from __future__ import annotations

from vla_rl.core.declarations import AlgorithmPlugin

plugin = AlgorithmPlugin(
    config="vla_rl.plugins.algorithms.gipo.config:GIPOConfig",
    build="vla_rl.plugins.algorithms.gipo.impl:GIPO",
    summary="Gaussian-trust policy optimisation for old samples",
    presets="vla_rl.plugins.algorithms.gipo.config:PRESETS",
)
