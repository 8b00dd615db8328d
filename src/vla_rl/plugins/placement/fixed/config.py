"""Settings of `collocated`, `disaggregated` and `hybrid`."""

from __future__ import annotations

from attrs import field, frozen
from attrs import validators as v

from vla_rl.toolkit.placement.devices import (
    MOST_WORKERS,
    Devices,
    OffloadSettings,
    RoleDevices,
    as_text,
    well_formed,
)


@frozen(kw_only=True)
class CollocatedConfig:
    """Spec keys of the placement `collocated`."""

    workers: int | None = field(default=None, validator=v.optional(v.and_(v.ge(1), v.le(MOST_WORKERS))))
    """Number of workers, 1 to 10,000, each with an equal share of the envs, on the first devices in order; null: one
    per GPU, or `cpu_workers` on a machine without GPUs."""
    cpu_workers: int = field(default=1, validator=v.and_(v.ge(1), v.le(MOST_WORKERS)))
    """Number of workers on a machine without GPUs, but no more than it has CPU cores. It counts where neither
    `workers` nor `devices` is given."""
    devices: Devices = field(default=None, converter=as_text, validator=well_formed)
    """Devices with one worker each, such as 0-3; an alternative to `workers`."""
    offload: OffloadSettings = field(factory=OffloadSettings)
    """Roles whose GPU memory is moved to host memory between phases."""

    @devices.validator
    def _one_of_both(self, attribute: object, value: str | None) -> None:
        if value is not None and self.workers is not None:
            raise ValueError("has one worker a device; leave out workers")


@frozen(kw_only=True)
class DisaggregatedConfig(RoleDevices):
    """Devices of each role. Roles without a list share the remaining devices evenly; the last of them in the order sim,
    policy, learner also gets the remainder."""

    share_devices: bool = False
    """Let roles name the same device, and share those that are left where these are fewer than the roles without named
    devices. Each role still has separate workers, each with an equal part of the GPU. For asynchronous training on
    one GPU."""


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
