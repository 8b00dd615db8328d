"""Hook `jsonl`: writes metrics.jsonl in the run folder, one JSON object per line."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.hooks.files import file_in_run


@frozen(kw_only=True)
class JsonlConfig:
    """Spec keys of the hook `jsonl`."""

    file: str = field(default="metrics.jsonl", validator=file_in_run)
    """Name of the file in the run folder; nothing else may write to it."""


def _build(config: JsonlConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.jsonl.writer import JsonlWriter

    return JsonlWriter(config)


plugin = Plugin(
    config=JsonlConfig,
    build=_build,
    summary="metrics of every step and evaluation as JSON lines",
    files=lambda config: (config.file,),
)
