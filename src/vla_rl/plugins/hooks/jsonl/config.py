"""Settings of `jsonl`."""

from __future__ import annotations

from attrs import field, frozen

from vla_rl.toolkit.hooks.files import file_in_run


@frozen(kw_only=True)
class JsonlConfig:
    """Spec keys of the hook `jsonl`."""

    file: str = field(default="metrics.jsonl", validator=file_in_run)
    """Name of the file in the run folder; nothing else may write to it."""
