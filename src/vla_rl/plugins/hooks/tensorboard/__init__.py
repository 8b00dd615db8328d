"""Hook `tensorboard`: curves and the spec, in the run folder."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class TensorboardConfig:
    flush_seconds: int = field(default=30, validator=[validators.ge(1), validators.le(86_400)])
    """Longest time that a written number stays in memory."""


def _build(config: TensorboardConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.tensorboard.writer import TensorboardWriter

    return TensorboardWriter(config)


plugin = Plugin(
    config=TensorboardConfig,
    build=_build,
    summary="curves of every metric for TensorBoard",
    files=lambda config: ("events.out.tfevents",),
)
