"""Data that goes to the world model of a run, and the result of fitting it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from vla_rl.core.types import Array, ResetState


@frozen(kw_only=True, eq=False)
class RecordedEpisode:
    """A complete episode of n chunks. Its last frame is the one after its last chunk."""

    images: Mapping[str, Array]
    """Images, camera -> uint8 [n + 1, H, W, 3]."""
    state: Array
    """Robot states, float32 [n + 1, S]."""
    actions: Array
    """Chunks of actions, float32 [n, C, A]."""
    executed: Array
    """Whether each action counts for the episode, bool [n, C]."""
    outcomes: Array
    """Outcome of each chunk, int64 [n], encoded as in `Windows`."""
    instruction: str
    task: str
    reset_state: int
    number: int
    """Number of the episode in the run. Together with the reset state it identifies the episode."""
    seed: int = 0
    step: int = 0
    """Training step for which the episode was rolled out."""


@frozen(kw_only=True)
class FitResult:
    """Result of a call of `WorldModelInterface.fit`."""

    updates: int
    version: int
    """Number of updates of the world model in the whole run: its version."""
    metrics: dict[str, float]
    thresholds_met: dict[str, bool]
    """Quality threshold -> whether it is met."""
    last_episodes: tuple[tuple[ResetState, bool], ...]
    """First windows of the last rollout's episodes, and whether each episode was a success."""


@frozen(kw_only=True)
class ImaginationRoles:
    """Settings of the roles that training in imagination adds to a worker."""

    folder: Path
    """Run folder, where episodes are kept."""
    lanes: Mapping[int, int] | None
    """Lane -> number of envs that the world model imagines for it; None: the world model is in another worker."""
