"""SRPO: GRPO in which a failed trajectory gets a reward for how near it came to the batch's own successes."""

from __future__ import annotations

from vla_rl.core.declarations import AlgorithmPlugin, HookPlugin

plugin = AlgorithmPlugin(
    config="vla_rl.plugins.algorithms.srpo.config:SRPOConfig",
    build="vla_rl.plugins.algorithms.srpo.impl:SRPO",
    summary="GRPO with progress rewards of failures, measured by V-JEPA 2",
    extra="srpo",
    presets="vla_rl.plugins.algorithms.srpo.config:PRESETS",
    preflight="vla_rl.plugins.algorithms.srpo.impl:check_encoder",
)
srpo_report = HookPlugin(
    config="vla_rl.plugins.algorithms.srpo.config:ReportConfig",
    build="vla_rl.plugins.algorithms.srpo.report:EmbeddingReport",
    summary="SRPO's embeddings, distances and rewards as npz, and a plot of them",
    extra="srpo",
    files=lambda config: ("srpo",),
)
