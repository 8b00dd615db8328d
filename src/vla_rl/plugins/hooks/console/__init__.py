"""Hook `console`: shows the progress of a run on the terminal."""

from __future__ import annotations

from vla_rl.core.declarations import HookPlugin

plugin = HookPlugin(
    config="vla_rl.plugins.hooks.console.config:ConsoleConfig",
    build="vla_rl.plugins.hooks.console.screen:Screen",
    summary="progress, success, throughput and time split, live",
)
