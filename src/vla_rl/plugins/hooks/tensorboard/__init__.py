"""Hook `tensorboard`: writes curves and the spec to the run folder."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class TensorboardConfig:
    """Spec keys of the hook `tensorboard`."""

    flush_seconds: int = field(default=30, validator=[validators.ge(1), validators.le(86_400)])
    """Longest time in seconds that a written number stays in memory, 1 to 86,400."""


def _build(config: TensorboardConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.tensorboard.writer import TensorboardWriter

    return TensorboardWriter(config)


plugin = Plugin(
    config=TensorboardConfig,
    build=_build,
    summary="curves of every metric for TensorBoard",
    files=lambda config: ("events.out.tfevents",),
)
