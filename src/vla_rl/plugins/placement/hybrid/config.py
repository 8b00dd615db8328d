"""Settings of `hybrid`."""

from __future__ import annotations

from attrs import field, frozen
from attrs import validators as v

from vla_rl.toolkit.placement.devices import RoleDevices


@frozen(kw_only=True)
class HybridConfig(RoleDevices):
    """Devices of each role. By default simulators get the first half, policies the second half and learners all."""

    pipeline_stages: int = field(default=1, validator=[v.ge(1), v.le(1_000)])
    """Pipeline stages (lanes) of each sim worker, 1 to 1,000: with 2, one lane simulates while the policy acts for the
    other."""

    @pipeline_stages.validator
    def _check_stages(self, attribute: object, value: int) -> None:
        if value > 1 and self.lanes != "stages":
            raise ValueError(
                f"has no effect with lanes: {self.lanes}, which overlap by themselves; leave one of both out"
            )
