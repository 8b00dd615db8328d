"""`torch`: the model itself acts, in the process of its policy worker."""

from __future__ import annotations

from vla_rl.core.declarations import EnginePlugin

plugin = EnginePlugin(
    config="vla_rl.toolkit.no_settings:NoSettings",
    build="vla_rl.plugins.engines.torch.engine:make_engine",
    summary="the model itself (default)",
)
