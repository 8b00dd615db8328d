"""Settings of `torch`."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class TorchEngineConfig:
    """Keys of `rollout.engine` with `type: torch`: none."""
