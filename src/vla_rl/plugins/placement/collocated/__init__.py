"""Collocated placement: every worker simulates, acts and learns, with one copy of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.types import Context, Plugin

if TYPE_CHECKING:
    from vla_rl.core.hookspecs import Placement


@frozen(kw_only=True)
class CollocatedConfig:
    workers: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Workers, each with an equal share of the rows; null: one a GPU, or one on a machine without."""


def build(config: CollocatedConfig, context: Context) -> Placement:
    from vla_rl.plugins.placement.collocated.impl import Collocated

    return Collocated(config)


plugin = Plugin(config=CollocatedConfig, build=build, summary="all roles in every worker, one copy of the weights")
