"""Automatic placement: measures the job's roles, then takes the split of devices with the shortest predicted
iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.placement.devices import OffloadSettings

if TYPE_CHECKING:
    from vla_rl.core.hookspecs import Placement


@frozen(kw_only=True)
class AutoConfig:
    """Spec keys of the placement `auto`."""

    offload: OffloadSettings = field(factory=OffloadSettings)
    """Roles whose GPU memory is moved to host memory between phases."""


def build(config: AutoConfig, context: Context) -> Placement:
    from vla_rl.plugins.placement.auto.impl import Auto

    return Auto(config)


plugin = Plugin(config=AutoConfig, build=build, summary="measures the roles, then takes the fastest split of devices")
