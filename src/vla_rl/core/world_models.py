"""The contract of world models, and the recorded windows they are trained on. Experimental until several exist."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from vla_rl.core.hookspecs import hookspec
from vla_rl.core.types import Array, Observation, SampleRecord

if TYPE_CHECKING:
    import torch

    from vla_rl.core.randomness import Noise


@frozen(kw_only=True, eq=False)
class Windows(SampleRecord):
    """B windows of recorded episodes, in NumPy: T chunk ends each, and the T - 1 chunks between them. Before the first
    and after the last frame of an episode that frame is repeated; the chunks there executed nothing."""

    images: Mapping[str, Array]
    state: Array
    """Observations: `images` is camera -> uint8 [B, T, H, W, 3]; `state` float32 [B, T, S], S = 0 without a state."""
    actions: Array
    executed: Array
    """Chunks: `actions` is float32 [B, T - 1, C, A], as requested; `executed` is bool [B, T - 1, C]."""
    outcomes: Array
    """Outcomes, int64 [B, T - 1]: 0, the episode continued; 1 + i, success at action i = 0 ...; 1 + C + i, failure."""
    first: Array
    states: Array
    seeds: Array
    """Origin of each window, int64 [B] each: `first` counts the chunks before its first frame (below 0 if that is
    repeated), `states` holds the reset state, `seeds` the seed of the reset."""
    instructions: tuple[str, ...]


class WorldModel(ABC):
    """A model that predicts the result of a chunk of actions. Experimental. Entry-point group `vla_rl.world_models`."""

    history: int
    """K, the number of chunk ends a prediction looks back on: the T of windows to imagine from."""
    module: torch.nn.Module | None = None
    """Everything that is trained; None if nothing is."""

    @abstractmethod
    @hookspec(firstresult=True)
    def fit(self, windows: Windows, noise: Noise) -> Mapping[str, float]:
        """Take one optimiser step of all parts on windows, T > K, and return metrics. The model owns the optimiser."""

    @abstractmethod
    @hookspec(firstresult=True)
    def imagine(self, windows: Windows, actions: Array, noise: Noise) -> Observation:
        """Return the observation after a chunk, float32 [B, C, A], that follows windows with T = K. NumPy, without
        gradient. A sample depends on its own window, actions and noise only."""

    @abstractmethod
    @hookspec(firstresult=True)
    def outcome(self, windows: Windows, actions: Array, after: Observation) -> Array:
        """Return the probabilities of `Windows.outcomes` for the chunk that led to `after`: float32 [B, 1 + 2 C]."""

    @hookspec(firstresult=True)
    def measure(self, windows: Windows, noise: Noise) -> Mapping[str, float]:
        """Return the model's own losses on held-out windows, T > K. Optional."""
        return {}

    @hookspec(firstresult=True)
    def training_state(self) -> Mapping[str, Any]:
        """Return what `load_training_state` needs besides the weights to resume; tensors in host memory. Optional."""
        return {}

    @hookspec(firstresult=True)  # noqa: B027 - optional
    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Resume from what `training_state` returned. Optional."""
