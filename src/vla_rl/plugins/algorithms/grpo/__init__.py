"""GRPO: group-relative advantages on fixed initial states, with the filters and the length normalisation of RLinf-VLA
(arXiv:2510.06710)."""

from __future__ import annotations

from vla_rl.core.declarations import AlgorithmPlugin

plugin = AlgorithmPlugin(
    config="vla_rl.plugins.algorithms.grpo.config:GRPOConfig",
    build="vla_rl.plugins.algorithms.grpo.impl:GRPO",
    summary="group-relative policy optimisation (no critic)",
    presets="vla_rl.plugins.algorithms.grpo.config:PRESETS",
)
