"""Settings of `wandb`."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from vla_rl.toolkit.hooks.tracking import TrackerSettings


@frozen(kw_only=True)
class WandbConfig(TrackerSettings):
    """Spec keys of the hook `wandb`, with those of TrackerSettings."""

    project: str = "vla-rl"
    """Project that groups the runs to compare."""
    entity: str | None = None
    """User or team; null: that of the login."""
    group: str | None = None
    """Group of runs that belong together, such as seeds of one spec."""
    tags: tuple[str, ...] = field(default=(), converter=tuple)
    """Tags of the run on Weights & Biases, to search by."""
    mode: Literal["online", "offline"] | None = None
    """Mode. `offline`: write to the run folder, for `wandb sync`; null: WANDB_MODE, else online."""
