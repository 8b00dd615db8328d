"""Settings of `swanlab`."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from vla_rl.toolkit.hooks.tracking import TrackerSettings


@frozen(kw_only=True)
class SwanlabConfig(TrackerSettings):
    """Spec keys of the hook `swanlab`, with those of TrackerSettings."""

    project: str = "vla-rl"
    """Project that groups the runs to compare."""
    workspace: str | None = None
    """User or organisation; null: that of the login."""
    tags: tuple[str, ...] = field(default=(), converter=tuple)
    """Tags of the run on SwanLab, to search by."""
    mode: Literal["online", "local", "offline"] | None = None
    """Mode. `local`, `offline`: write to the run folder, offline for `swanlab sync`; null: SWANLAB_MODE, else
    online."""
