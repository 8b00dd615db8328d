"""Hook `mlflow`: logs the run to MLflow."""

from __future__ import annotations

from vla_rl.core.declarations import HookPlugin

plugin = HookPlugin(
    config="vla_rl.plugins.hooks.mlflow.config:MlflowConfig",
    build="vla_rl.plugins.hooks.mlflow.store:make_tracker",
    summary="metrics, spec, videos and checkpoints in MLflow",
    extra="mlflow",
    files=lambda config: (".uploading/mlflow",),
)
