"""Hook `wandb`: the run on Weights & Biases."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen

from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.hooks.tracking import TrackerSettings, tracker_files


@frozen(kw_only=True)
class WandbConfig(TrackerSettings):
    project: str = "vla-rl"
    """Of the runs that are compared."""
    entity: str | None = None
    """User or team; by default that of the login."""
    name: str | None = None
    """Of the run there; by default the spec's."""
    group: str | None = None
    """Of runs that belong together, such as seeds."""
    tags: tuple[str, ...] = field(default=(), converter=tuple)
    """To find it by."""
    mode: Literal["online", "offline"] | None = None
    """offline: into the run folder, for `wandb sync`; by default as WANDB_MODE says, or online."""


def _build(config: WandbConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.wandb.store import WandbStore
    from vla_rl.toolkit.hooks.tracking import Tracker

    return Tracker("wandb", config, WandbStore(config))


plugin = Plugin(
    config=WandbConfig,
    build=_build,
    summary="metrics, spec, films and checkpoints on Weights & Biases",
    extra="wandb",
    files=lambda config: tracker_files("wandb"),
)
