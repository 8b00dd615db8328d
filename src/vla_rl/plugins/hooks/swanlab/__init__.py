"""Hook `swanlab`: logs the run to SwanLab."""

from __future__ import annotations

from vla_rl.core.declarations import HookPlugin

plugin = HookPlugin(
    config="vla_rl.plugins.hooks.swanlab.config:SwanlabConfig",
    build="vla_rl.plugins.hooks.swanlab.store:make_tracker",
    summary="metrics, spec, videos and checkpoints on SwanLab",
    extra="swanlab",
    files=lambda config: (".uploading/swanlab",),
)
