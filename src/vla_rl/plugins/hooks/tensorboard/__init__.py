"""Hook `tensorboard`: writes curves and the spec to the run folder."""

from __future__ import annotations

from vla_rl.core.declarations import HookPlugin

plugin = HookPlugin(
    config="vla_rl.toolkit.no_settings:NoSettings",
    build="vla_rl.plugins.hooks.tensorboard.writer:TensorboardWriter",
    summary="curves of every metric for TensorBoard",
    files=lambda config: ("events.out.tfevents",),
)
