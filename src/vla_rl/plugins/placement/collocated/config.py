"""Settings of `collocated`."""

from __future__ import annotations

from attrs import field, frozen
from attrs import validators as v

from vla_rl.toolkit.placement.devices import MOST_WORKERS, Devices, OffloadSettings, as_text, well_formed


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
