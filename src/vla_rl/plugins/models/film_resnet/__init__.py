"""A small policy for debugging a simulator, and for learning on a CPU: a FiLM-conditioned residual network a camera."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.models.film_resnet.checkpoint import action_dim, check
from vla_rl.plugins.models.film_resnet.config import FilmResnetConfig, FilmValueHeadConfig, NetworkConfig

if TYPE_CHECKING:
    from vla_rl.plugins.models.film_resnet.policy import FilmResnetPolicy


__all__ = ["FilmResnetConfig", "FilmValueHeadConfig", "NetworkConfig", "build", "plugin"]


def build(config: FilmResnetConfig, context: Context) -> FilmResnetPolicy:
    """The policy of this spec on the device of this place in the run."""
    from vla_rl.plugins.models.film_resnet.builder import build_policy

    return build_policy(config, context)


plugin = Plugin(
    config=FilmResnetConfig,
    build=build,
    summary="small residual networks, FiLM by the instruction, action bins; trained from random weights on a CPU",
    action_dim=action_dim,
    check=check,
)
