"""Hook `swanlab`: logs the run to SwanLab."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen

from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.hooks.tracking import TrackerSettings, tracker_files


@frozen(kw_only=True)
class SwanlabConfig(TrackerSettings):
    """Spec keys of the hook `swanlab`, with those of TrackerSettings."""

    project: str = "vla-rl"
    """Project that groups the runs to compare."""
    workspace: str | None = None
    """User or organisation; null: that of the login."""
    name: str | None = None
    """Name of the run on SwanLab; null: the spec's."""
    tags: tuple[str, ...] = field(default=(), converter=tuple)
    """Tags of the run on SwanLab, to search by."""
    mode: Literal["online", "local", "offline"] | None = None
    """Mode. `local`, `offline`: write to the run folder, offline for `swanlab sync`; null: SWANLAB_MODE, else
    online."""


def _build(config: SwanlabConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.swanlab.store import SwanlabStore
    from vla_rl.toolkit.hooks.tracking import Tracker

    return Tracker("swanlab", config, SwanlabStore(config))


plugin = Plugin(
    config=SwanlabConfig,
    build=_build,
    summary="metrics, spec, videos and checkpoints on SwanLab",
    extra="swanlab",
    files=lambda config: tracker_files("swanlab"),
)
