"""Settings of plugins that have none."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class NoSettings:
    """Spec keys of a plugin that has none of its own."""
