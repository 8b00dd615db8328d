"""Hook `wandb`: logs the run to Weights & Biases."""

from __future__ import annotations

from vla_rl.core.declarations import HookPlugin

plugin = HookPlugin(
    config="vla_rl.plugins.hooks.wandb.config:WandbConfig",
    build="vla_rl.plugins.hooks.wandb.store:make_tracker",
    summary="metrics, spec, videos and checkpoints on Weights & Biases",
    extra="wandb",
    files=lambda config: (".uploading/wandb",),
)
