"""Engine that calls the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from vla_rl.core.capabilities import ContinuesChunks, HasCritic, require_capability
from vla_rl.core.contexts import EngineContext
from vla_rl.core.hookspecs import PolicyEngine, VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.types import ArrayOrTensor, Chunk, Observation, UnexecutedActions
from vla_rl.toolkit.models.adapters import MergedAdapters, merge_mode
from vla_rl.toolkit.no_settings import NoSettings


def make_engine(config: NoSettings, context: EngineContext) -> TorchEngine:
    """Build the run's model, if its learner has not built it in this process, and return the engine around it."""
    assert context.make_model is not None
    model = context.make_model()
    kind = ContinuingTorchEngine if isinstance(model, ContinuesChunks) else TorchEngine
    return kind(model, merge=merge_mode(context.model_config), learns=context.role == "both")


class TorchEngine(PolicyEngine):
    """The model of this process, with its wrappers. A learner in this process trains the same weights. With
    `lora.merge_for_acting` adapters are merged into the weights of their layers: always, where nothing learns in this
    process, else between `wake_up` and `sleep`."""

    model: VLAModel

    def __init__(self, model: VLAModel, *, merge: str = "off", learns: bool = False) -> None:
        """Create the engine.

        Args:
            merge: `lora.merge_for_acting` of the model.
            learns: a learner in this process uses the model between `sleep` and `wake_up`.
        """
        self.model = model
        self.statistics_name = model.statistics_name
        self._adapters = None if merge == "off" else MergedAdapters(model.module, merge)
        self._learns = learns
        self._awake = 0
        """Rollouts that run now: real ones and imagined ones may do so at the same time."""
        if self._adapters is not None and not learns:
            self._adapters.merge_weights()

    def act(self, obs: Observation, noise: Noise, greedy: bool) -> Chunk:
        return self.model.sample_chunk(obs, noise, greedy)

    def values(self, obs: Observation) -> torch.Tensor:
        return require_capability(self.model, HasCritic, "a rollout with values").values(obs)

    def load(self, pairs: Iterable[tuple[str, ArrayOrTensor]]) -> None:
        adapters = self._adapters
        if adapters is None or not adapters.merged:
            self.model.load_weights(pairs)
            return
        adapters.restore_weights()
        self.model.load_weights(pairs)
        adapters.merge_weights()

    def wake_up(self) -> None:
        if self._adapters is None or not self._learns:
            return
        self._awake += 1
        self._adapters.merge_weights()

    def sleep(self) -> None:
        if self._adapters is None or not self._learns:
            return
        self._awake -= 1
        if not self._awake:
            self._adapters.restore_weights()


class ContinuingTorchEngine(TorchEngine, ContinuesChunks):
    """The engine for a model that continues chunks."""

    def continue_chunk(
        self, obs: Observation, noise: Noise, greedy: bool, previous: Sequence[UnexecutedActions]
    ) -> torch.Tensor:
        model = require_capability(self.model, ContinuesChunks, "a server")
        return model.continue_chunk(obs, noise, greedy, previous)
