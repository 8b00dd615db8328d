"""Remote methods of the roles that training in imagination adds to workers with simulators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from vla_rl.core.types import Array, ResetState
from vla_rl.runtime.comm.remote import remote
from vla_rl.runtime.messages.requests import EpisodeRequest, StepRequest


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


WORLD_MODEL = "world_model"
IMAGINED = "imagined"
RECORDINGS = "world_model_recordings"
"""Roles: the world model, its envs, and what workers record for it."""
TRAINING = "imagination"
MEASURING = "over_estimation"
"""Purposes for which policies act in the imagined envs."""


class WorldModelInterface(ABC):
    """The world model of a run (role `WORLD_MODEL`)."""

    @remote(track="background", group="background")
    @abstractmethod
    def fit(self, step: int, *ended: list[RecordedEpisode]) -> FitResult:
        """Record a step's episodes (a list per worker, by tickets), fit the world model to all records, measure it."""

    @remote(track="background", group="background")
    @abstractmethod
    def draw_starts(self, groups: Sequence[int]) -> list[ResetState]:
        """Draw the initial windows of these groups of imagined trajectories from the train episodes; [] without any."""

    @remote(track="background", group="background")
    @abstractmethod
    def finish_step(self) -> None:
        """Take note that the training step is over, so that `save` writes its state."""

    @remote(track="background", group="background")
    @abstractmethod
    def save(self, file: Path) -> None:
        """Write the state after the last finished step, and images that compare recorded with imagined episodes."""

    @remote(track="background", group="background")
    @abstractmethod
    def load(self, file: Path) -> None:
        """Restore what `save` wrote."""


class ImaginedEnvInterface(ABC):
    """The imagined envs of the world model (role `IMAGINED`)."""

    @remote(track="background", group="background", lane=0)
    @abstractmethod
    def begin(self, lane: int, purpose: str, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        """Start these tickets, as `EnvInterface.begin` does."""

    @remote(track="background", group="background", lane=0)
    @abstractmethod
    def step(self, lane: int, actions: Any, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        """Execute a chunk in each imagined env, as `EnvInterface.step` does."""


class WorldModelRecordingInterface(ABC):
    """Episodes that a worker recorded for the world model (role `RECORDINGS`)."""

    @remote(track="background", group="background")
    @abstractmethod
    def take_episodes(self, last: int) -> list[RecordedEpisode]:
        """Return the episodes of tickets up to this number, and forget them here."""
