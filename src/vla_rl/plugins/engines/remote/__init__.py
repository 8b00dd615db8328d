"""`remote`: a policy that another process serves over a websocket (openpi's protocol), to be evaluated on our
simulators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla_rl.core.types import Context, Plugin
from vla_rl.plugins.engines.remote.config import RemoteConfig, check

if TYPE_CHECKING:
    from vla_rl.plugins.engines.remote.engine import RemoteEngine


__all__ = ["RemoteConfig", "build", "plugin"]


def build(config: RemoteConfig, context: Context) -> RemoteEngine:
    """Return the engine, already connected."""
    from vla_rl.plugins.engines.remote.engine import RemoteEngine

    return RemoteEngine(config, context)


plugin = Plugin(
    config=RemoteConfig,
    build=build,
    summary="a policy behind a websocket (openpi's protocol), for `vla-rl eval --policy ws://...`",
    extra="serve",
    check=check,
    own_policy=True,
)
