"""Disaggregated placement: each role on its own devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from vla_rl.core.types import Context, Plugin
from vla_rl.toolkit.placement.devices import RoleDevices

if TYPE_CHECKING:
    from vla_rl.core.hookspecs import Placement


@frozen(kw_only=True)
class DisaggregatedConfig(RoleDevices):
    """Devices of each role. Roles without a list share the remaining devices evenly; the last of them in the order sim,
    policy, learner also gets the remainder."""

    share_devices: bool = False
    """Let roles name the same device, and share those that are left where these are fewer than the roles without named
    devices. Each role still has workers of its own, each with an equal part of the GPU. For asynchronous training on
    one GPU."""


def build(config: DisaggregatedConfig, context: Context) -> Placement:
    from vla_rl.plugins.placement.disaggregated.impl import Disaggregated

    return Disaggregated(config)


plugin = Plugin(config=DisaggregatedConfig, build=build, summary="each role on devices of its own")
