"""Settings of `wandb`, `mlflow` and `swanlab`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import Factory, field, frozen

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


@frozen(kw_only=True)
class MlflowConfig(TrackerSettings):
    """Spec keys of the hook `mlflow`, with those of TrackerSettings."""

    tracking_uri: str | None = None
    """URI of a server, or of a database such as sqlite:///mlflow.db; null: MLFLOW_TRACKING_URI, else mlflow.db next to
    the run folder."""
    experiment: str = "vla-rl"
    """Experiment that groups the runs to compare."""
    tags: Mapping[str, str] = Factory(dict)
    """Tags of the run in MLflow, to search by."""


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
