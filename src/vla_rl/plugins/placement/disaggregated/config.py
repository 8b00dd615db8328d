"""Settings of `disaggregated`."""

from __future__ import annotations

from attrs import frozen

from vla_rl.toolkit.placement.devices import RoleDevices


@frozen(kw_only=True)
class DisaggregatedConfig(RoleDevices):
    """Devices of each role. Roles without a list share the remaining devices evenly; the last of them in the order sim,
    policy, learner also gets the remainder."""

    share_devices: bool = False
    """Let roles name the same device, and share those that are left where these are fewer than the roles without named
    devices. Each role still has separate workers, each with an equal part of the GPU. For asynchronous training on
    one GPU."""
