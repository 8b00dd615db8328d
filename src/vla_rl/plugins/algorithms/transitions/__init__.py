"""`transitions`: no algorithm of its own; hands what is collected to a trainer of transitions."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class TransitionsConfig:
    """Spec keys of the algorithm `transitions`: none."""


def build(config: TransitionsConfig, context: Context) -> Any:
    from vla_rl.plugins.algorithms.transitions.impl import TransitionFields

    return TransitionFields()


plugin = Plugin(
    config=TransitionsConfig,
    build=build,
    summary="no policy gradient: all transitions go to an off-policy trainer (the default with one)",
)
