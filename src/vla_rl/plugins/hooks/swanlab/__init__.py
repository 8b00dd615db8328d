"""Hook `swanlab`: the run on SwanLab."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen

from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.hooks.tracking import TrackerSettings, tracker_files


@frozen(kw_only=True)
class SwanlabConfig(TrackerSettings):
    project: str = "vla-rl"
    """Of the runs that are compared."""
    workspace: str | None = None
    """User or organisation; by default that of the login."""
    name: str | None = None
    """Of the run there; by default the spec's."""
    tags: tuple[str, ...] = field(default=(), converter=tuple)
    """To find it by."""
    mode: Literal["online", "local", "offline"] | None = None
    """local, offline: into the run folder, offline for `swanlab sync`; by default as SWANLAB_MODE, or online."""


def _build(config: SwanlabConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.swanlab.store import SwanlabStore
    from vla_rl.toolkit.hooks.tracking import Tracker

    return Tracker("swanlab", config, SwanlabStore(config))


plugin = Plugin(
    config=SwanlabConfig,
    build=_build,
    summary="metrics, spec, films and checkpoints on SwanLab",
    extra="swanlab",
    files=lambda config: tracker_files("swanlab"),
)
