"""Hook `jsonl`: metrics.jsonl in the run folder, one JSON object a line."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class JsonlConfig:
    file: str = "metrics.jsonl"
    """Name of the file within the run folder."""


def _build(config: JsonlConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.jsonl.writer import JsonlWriter

    return JsonlWriter(config)


plugin = Plugin(config=JsonlConfig, build=_build, summary="metrics of every step and evaluation as JSON lines")
