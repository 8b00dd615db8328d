"""Hook `mlflow`: the run in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, frozen

from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.hooks.tracking import TrackerSettings, tracker_files


@frozen(kw_only=True)
class MlflowConfig(TrackerSettings):
    tracking_uri: str | None = None
    """Of a server, or a database such as sqlite:///mlflow.db; by default MLFLOW_TRACKING_URI, or mlflow.db beside the
    run folder."""
    experiment: str = "vla-rl"
    """Of the runs that are compared."""
    name: str | None = None
    """Of the run there; by default the spec's."""
    tags: Mapping[str, str] = Factory(dict)
    """To find it by."""


def _build(config: MlflowConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.mlflow.store import MlflowStore
    from vla_rl.toolkit.hooks.tracking import Tracker

    return Tracker("mlflow", config, MlflowStore(config))


plugin = Plugin(
    config=MlflowConfig,
    build=_build,
    summary="metrics, spec, films and checkpoints in MLflow",
    extra="mlflow",
    files=lambda config: tracker_files("mlflow"),
)
