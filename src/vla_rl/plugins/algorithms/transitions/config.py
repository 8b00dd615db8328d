"""Settings of `transitions`."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class TransitionsConfig:
    """Spec keys of the algorithm `transitions`: none."""
