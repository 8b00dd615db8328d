"""`remote`: a policy that another process serves over a websocket (openpi's protocol), to be evaluated on our
simulators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.models.remote.config import RemoteConfig, check

if TYPE_CHECKING:
    from vla_rl.plugins.models.remote.policy import RemotePolicy


__all__ = ["RemoteConfig", "build", "plugin"]


def build(config: RemoteConfig, context: Context) -> RemotePolicy:
    """Return the policy, already connected."""
    from vla_rl.plugins.models.remote.policy import RemotePolicy

    return RemotePolicy(config, context)


plugin = Plugin(
    config=RemoteConfig,
    build=build,
    summary="a policy behind a websocket (openpi's protocol), for `vla-rl eval --policy ws://...`",
    extra="serve",
    check=check,
    acts_only=True,
)
