"""Settings of `classifier`."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen


@frozen(kw_only=True)
class ClassifierConfig:
    """Spec keys of the reward model `classifier`."""

    folder: Path = field()
    """Folder that `vla-rl fit-rewards` wrote."""
