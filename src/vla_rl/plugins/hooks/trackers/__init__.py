"""Hooks `wandb`, `mlflow` and `swanlab`: log the run to an experiment tracker."""

from __future__ import annotations

from vla_rl.core.declarations import HookPlugin

wandb = HookPlugin(
    config="vla_rl.plugins.hooks.trackers.config:WandbConfig",
    build="vla_rl.plugins.hooks.trackers.wandb_store:make_tracker",
    summary="metrics, spec, videos and checkpoints on Weights & Biases",
    extra="wandb",
    files=lambda config: (".uploading/wandb",),
)
mlflow = HookPlugin(
    config="vla_rl.plugins.hooks.trackers.config:MlflowConfig",
    build="vla_rl.plugins.hooks.trackers.mlflow_store:make_tracker",
    summary="metrics, spec, videos and checkpoints in MLflow",
    extra="mlflow",
    files=lambda config: (".uploading/mlflow",),
)
swanlab = HookPlugin(
    config="vla_rl.plugins.hooks.trackers.config:SwanlabConfig",
    build="vla_rl.plugins.hooks.trackers.swanlab_store:make_tracker",
    summary="metrics, spec, videos and checkpoints on SwanLab",
    extra="swanlab",
    files=lambda config: (".uploading/swanlab",),
)
