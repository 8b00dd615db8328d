"""`remote`: a policy that another process serves over a websocket (openpi's protocol), evaluated on our simulators."""

from __future__ import annotations

from vla_rl.core.declarations import EnginePlugin

plugin = EnginePlugin(
    config="vla_rl.plugins.engines.remote.config:RemoteConfig",
    build="vla_rl.plugins.engines.remote.engine:RemoteEngine",
    summary="a policy behind a websocket (openpi's protocol), for `vla-rl eval --policy ws://...`",
    extra="serve",
    own_policy=True,
    check="vla_rl.plugins.engines.remote.config:check_key_map",
)
