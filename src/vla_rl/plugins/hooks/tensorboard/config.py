"""Settings of `tensorboard`."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class TensorboardConfig:
    """Spec keys of the hook `tensorboard`: none."""
