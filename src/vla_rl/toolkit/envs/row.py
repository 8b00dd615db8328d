"""A simulator that holds one scene, as a plugin writes it: `RowsEnv` (`rows.py`) makes N of them a `SimEnv`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vla_rl.core.errors import NotOffered
from vla_rl.core.types import Array


class Outcome(NamedTuple):
    """What one action led to."""

    reward: float
    success: bool
    terminated: bool
    truncated: bool = False


class View(NamedTuple):
    """What a policy sees of a row."""

    images: Mapping[str, Array]
    """Camera -> uint8 [H, W, 3], upright."""
    state: Array | None = None
    """float32 [S]."""
    instruction: str | None = None
    """None: that of the task."""


class Row(ABC):
    """One simulator. It is made where it will live, and may put off building its scene to the first reset."""

    @abstractmethod
    def reset(self, state_id: int, seed: int) -> None:
        """Start an episode from this state; `seed` keys whatever else is random in it."""

    @abstractmethod
    def step(self, action: Array) -> Outcome:
        """Apply one action, float32 [A]."""

    @abstractmethod
    def render(self) -> View:
        """Render; asked for after a reset and at the end of a chunk only."""

    def expert_chunk(self, length: int) -> Array:
        """Optional: a scripted demonstrator's next actions, float32 [length, A], without effect on the simulator."""
        raise NotOffered(f"{type(self).__name__} has no scripted expert")

    def close(self) -> None:  # noqa: B027 - optional
        """Free GL contexts and the like."""


MakeRow = Callable[[int], Row]
"""Row number within the run -> its simulator. Must be picklable: a module-level function or an attrs instance."""
