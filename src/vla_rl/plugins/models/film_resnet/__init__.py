"""`film_resnet`: a small policy for debugging a simulator and for training on a CPU, one FiLM-conditioned residual
network per camera."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.models.film_resnet.checkpoint import action_dim, check
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig, FilmValueHeadConfig, NetworkConfig

if TYPE_CHECKING:
    from vla_rl.plugins.models.film_resnet.policy import FilmPolicy


__all__ = ["FilmResnetConfig", "FilmValueHeadConfig", "NetworkConfig", "build", "plugin"]


def build(config: FilmResnetConfig, context: Context) -> FilmPolicy:
    """Return the spec's policy on this worker's device."""
    from vla_rl.plugins.models.film_resnet.builder import build_policy

    return build_policy(config, context)


plugin = Plugin(
    config=FilmResnetConfig,
    build=build,
    summary="small residual networks, FiLM by the instruction, action bins; trained from random weights on a CPU",
    action_dim=action_dim,
    check=check,
)
