"""Hook `mlflow`: logs the run to MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, frozen

from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.hooks.tracking import TrackerSettings, tracker_files


@frozen(kw_only=True)
class MlflowConfig(TrackerSettings):
    """Spec keys of the hook `mlflow`, with those of TrackerSettings."""

    tracking_uri: str | None = None
    """URI of a server, or of a database such as sqlite:///mlflow.db; null: MLFLOW_TRACKING_URI, else mlflow.db beside
    the run folder."""
    experiment: str = "vla-rl"
    """Experiment that groups the runs to compare."""
    name: str | None = None
    """Name of the run in MLflow; null: the spec's."""
    tags: Mapping[str, str] = Factory(dict)
    """Tags of the run in MLflow, to search by."""


def _build(config: MlflowConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.mlflow.store import MlflowStore
    from vla_rl.toolkit.hooks.tracking import Tracker

    return Tracker("mlflow", config, MlflowStore(config))


plugin = Plugin(
    config=MlflowConfig,
    build=_build,
    summary="metrics, spec, videos and checkpoints in MLflow",
    extra="mlflow",
    files=lambda config: tracker_files("mlflow"),
)
