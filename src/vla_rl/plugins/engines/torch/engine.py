"""Engine that calls the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vla_rl.core.hookspecs import PolicyEngine, VLAModel
from vla_rl.core.manager import offers

if TYPE_CHECKING:
    import torch

    from vla_rl.core.randomness import Noise
    from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, UnexecutedActions


class TorchEngine(PolicyEngine):
    """The model of this process, with its wrappers. A learner in this process trains the same weights."""

    model: VLAModel

    def __init__(self, model: VLAModel) -> None:
        self.model = model
        self.statistics_name = model.statistics_name
        self.continues = offers(model, "continue_chunk")

    def act(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        return self.model.sample_chunk(obs, noise, greedy)

    def continue_chunk(
        self, obs: Observation, noise: Noise, greedy: bool, previous: Sequence[UnexecutedActions]
    ) -> torch.Tensor:
        return self.model.continue_chunk(obs, noise, greedy, previous)

    def values(self, obs: Observation) -> torch.Tensor:
        return self.model.values(obs)

    def load(self, pairs: Iterable[tuple[str, ArrayOrTensor]]) -> None:
        self.model.load_weights(pairs)
