"""Hook `jsonl`: writes metrics.jsonl in the run folder, one JSON object per line."""

from __future__ import annotations

from vla_rl.core.declarations import HookPlugin

plugin = HookPlugin(
    config="vla_rl.plugins.hooks.jsonl.config:JsonlConfig",
    build="vla_rl.plugins.hooks.jsonl.writer:JsonlWriter",
    summary="metrics of every step and evaluation as JSON lines",
    files=lambda config: (config.file,),
)
