"""Settings of `auto`."""

from __future__ import annotations

from attrs import field, frozen

from vla_rl.toolkit.placement.devices import OffloadSettings


@frozen(kw_only=True)
class AutoConfig:
    """Spec keys of the placement `auto`."""

    offload: OffloadSettings = field(factory=OffloadSettings)
    """Roles whose GPU memory is moved to host memory between phases."""
