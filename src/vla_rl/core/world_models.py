"""The contract of world models, and what they see of episodes. Experimental: it may change until several exist."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from vla_rl.core.hookspecs import hookspec
from vla_rl.core.types import Array, Observation

if TYPE_CHECKING:
    import torch

    from vla_rl.core.randomness import Noise


@frozen(kw_only=True, eq=False)
class Windows:
    """B stretches of episodes, in NumPy: T chunk ends each, and the T - 1 chunks between them. Beyond the first and the
    last frame of an episode that frame is repeated; the chunks there executed nothing."""

    images: Mapping[str, Array]
    state: Array
    """Camera -> uint8 [B, T, H, W, 3]; float32 [B, T, S], with S = 0 where the simulator has no state."""
    actions: Array
    executed: Array
    """float32 [B, T - 1, C, A], as they were asked for; bool [B, T - 1, C]."""
    outcomes: Array
    """int64 [B, T - 1]: 0 where the episode went on; else 1 + i, success at action i = 0 ..., or 1 + C + i, failure."""
    first: Array
    states: Array
    seeds: Array
    """int64 [B]: chunks before the first frame (below 0 where that is repeated); reset state; seed of the reset."""
    instructions: tuple[str, ...]


class WorldModel(ABC):
    """Predicts what a chunk of actions leads to. Experimental. Entry-point group `vla_rl.world_models`."""

    history: int
    """K, how many chunk ends a prediction looks back on: the T of windows to imagine from."""
    module: torch.nn.Module | None = None
    """All that is trained; none where nothing is."""

    @abstractmethod
    @hookspec(firstresult=True)
    def fit(self, windows: Windows, noise: Noise) -> Mapping[str, float]:
        """One optimiser step of all parts on recorded windows, T > K. -> metrics. The optimiser is the model's own."""

    @abstractmethod
    @hookspec(firstresult=True)
    def imagine(self, windows: Windows, actions: Array, noise: Noise) -> Observation:
        """What is seen after a chunk float32 [B, C, A] that follows windows with T = K. NumPy, without gradient. A row
        depends on its own window, actions and noise only."""

    @abstractmethod
    @hookspec(firstresult=True)
    def outcome(self, windows: Windows, actions: Array, after: Observation) -> Array:
        """float32 [B, 1 + 2 C]: probabilities of the classes of `Windows.outcomes` for the chunk that led here."""

    @hookspec(firstresult=True)
    def measure(self, windows: Windows, noise: Noise) -> Mapping[str, float]:
        """Optional: the model's own losses on held-out windows, T > K."""
        return {}

    @hookspec(firstresult=True)
    def training_state(self) -> Mapping[str, Any]:
        """Optional: what `load_training_state` needs besides the weights, to go on exactly; tensors on the host."""
        return {}

    @hookspec(firstresult=True)  # noqa: B027 - optional
    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Optional: go on from what `training_state` gave."""
