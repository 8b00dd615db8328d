"""Settings of `mlflow`."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import Factory, frozen

from vla_rl.toolkit.hooks.tracking import TrackerSettings


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
