"""SRPO: GRPO in which failed trajectories are paid for how near they came to the batch's own successes."""

from __future__ import annotations

from typing import Any

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.algorithms.srpo.settings import SIIRL, ReportConfig, SRPOConfig


def build(config: SRPOConfig, context: Context) -> Any:
    from vla_rl.plugins.algorithms.srpo.impl import SRPO

    return SRPO(config, context.device)


def look(config: SRPOConfig) -> None:
    from vla_rl.plugins.algorithms.srpo.encoder import check_checkpoint

    check_checkpoint(config.encoder)


def build_report(config: ReportConfig, context: Context) -> Any:
    from vla_rl.plugins.algorithms.srpo.report import EmbeddingReport

    return EmbeddingReport(config)


plugin = Plugin(
    config=SRPOConfig,
    build=build,
    summary="GRPO with progress rewards of failures, measured by V-JEPA 2",
    extra="srpo",
    presets={"siirl-srpo": SIIRL},
    preflight=look,
)
srpo_report = Plugin(
    config=ReportConfig,
    build=build_report,
    summary="SRPO's embeddings, distances and rewards as npz, and a plot of them",
    extra="srpo",
    files=lambda config: ("srpo",),
)
