"""Remote methods of the roles that training in imagination adds to workers with simulators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl.core.types import ResetState
from vla_rl.runtime.comm.remote import remote
from vla_rl.runtime.imagination.messages import FitResult, RecordedEpisode
from vla_rl.runtime.messages.requests import EpisodeRequest, StepRequest

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
        """Record the episodes of a step (one list for each worker with simulators, in the order of their tickets), fit
        the world model to all that is recorded, and measure it."""

    @remote(track="background", group="background")
    @abstractmethod
    def draw_starts(self, groups: Sequence[int]) -> list[ResetState]:
        """Draw the initial windows of these groups of imagined trajectories from the train episodes; [] without train
        episodes."""

    @remote(track="background", group="background")
    @abstractmethod
    def finish_step(self) -> None:
        """Take note that the training step is over, so that `save` writes its state."""

    @remote(track="background", group="background")
    @abstractmethod
    def save(self, file: Path) -> None:
        """Write the state at the end of the last finished step, and images that compare recorded with imagined
        episodes."""

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
