"""What the world model of a run is given, and what it says of a fit."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from vla_rl.core.types import Array, ResetState


@frozen(kw_only=True, eq=False)
class RecordedEpisode:
    """A complete episode of n chunks. Its last frame is the one that it ended with."""

    images: Mapping[str, Array]
    """Camera -> uint8 [n + 1, H, W, 3]."""
    state: Array
    """float32 [n + 1, S]."""
    actions: Array
    """float32 [n, C, A]."""
    executed: Array
    """bool [n, C]."""
    outcomes: Array
    """int64 [n], as in `Windows`."""
    instruction: str
    task: str
    reset_state: int
    number: int
    """Of the episode in the run; with the reset state its identity."""
    seed: int = 0
    step: int = 0
    """Training step that it was played for."""


@frozen(kw_only=True)
class FitResult:
    """What came of a fit."""

    updates: int
    version: int
    """Updates of the world model in the whole run: its version."""
    metrics: dict[str, float]
    gates: dict[str, bool]
    """Name -> open."""
    last: tuple[tuple[ResetState, bool], ...]
    """First windows of the last rollout's episodes, and whether each was a success."""
