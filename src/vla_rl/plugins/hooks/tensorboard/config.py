"""Settings of `tensorboard`."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class TensorboardConfig:
    """Spec keys of the hook `tensorboard`."""

    flush_seconds: int = field(default=30, validator=[validators.ge(1), validators.le(86_400)])
    """Longest time in seconds that a written number stays in memory, 1 to 86,400."""
