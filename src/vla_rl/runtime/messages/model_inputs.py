"""The heavy part of a rollout: what a model saw and how it chose; it stays where it was made until used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import frozen

from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.types import Array, ArrayOrTensor, Chunk, EnvInfo, Observation, concat, pick, to_numpy


@frozen(kw_only=True, eq=False)
class ModelInputs:
    """B samples: observations, chosen actions [B, C, A] and the model's own replay, batch first."""

    obs: Observation
    actions: ArrayOrTensor
    replay: Mapping[str, ArrayOrTensor]

    def __len__(self) -> int:
        return len(self.obs)

    def take(self, indices: Array) -> ModelInputs:
        if np.array_equal(indices, np.arange(len(self))):
            return self
        return ModelInputs(
            obs=self.obs.take(indices),
            actions=pick(self.actions, indices),
            extras={name: pick(tensor, indices) for name, tensor in self.extras.items()},
        )

    @property
    def nbytes(self) -> int:
        return nbytes(self.obs) + int(self.actions.nbytes) + sum(int(tensor.nbytes) for tensor in self.extras.values())

    def numpy(self) -> ModelInputs:
        replay = {name: to_numpy(tensor) for name, tensor in self.extras.items()}
        return ModelInputs(obs=self.obs.numpy(), actions=to_numpy(self.actions), extras=replay)

    @staticmethod
    def concat(parts: Sequence[ModelInputs]) -> ModelInputs:
        if len(parts) == 1:
            return parts[0]
        return ModelInputs(
            obs=Observation.concat([part.obs for part in parts]),
            actions=concat([part.actions for part in parts]),
            extras={name: concat([part.extras[name] for part in parts]) for name in parts[0].extras},
        )


def nbytes(obs: Observation) -> int:
    """Of its arrays; a string is written once for many rows."""
    arrays = [*obs.images.values(), obs.state, obs.steps]
    return sum(int(array.nbytes) for array in arrays if array is not None)


@frozen(kw_only=True, eq=False)
class SampleBatch:
    """Samples that one policy made, on their way to a learner."""

    places: Array
    """int64 [B] ascending: where they lie with that policy."""
    heavy: ModelInputs
    ended: Array
    """int64 [K] ascending: places of those behind which there is a final observation; none where values are never asked
    for again."""
    finals: Observation | None
    """These, [K]; None: there is none."""

    def numpy(self) -> SampleBatch:
        finals = None if self.finals is None else self.finals.numpy()
        return SampleBatch(places=self.places, heavy=self.heavy.numpy(), ended=self.ended, finals=finals)

    @staticmethod
    def concat(parts: Sequence[SampleBatch]) -> SampleBatch:
        finals = [part.finals for part in parts if part.finals is not None]
        return SampleBatch(
            places=np.concatenate([part.places for part in parts]),
            heavy=ModelInputs.concat([part.heavy for part in parts]),
            ended=np.concatenate([part.ended for part in parts]),
            finals=Observation.concat(finals) if finals else None,
        )


def dummy_sample(model: VLAModel, info: EnvInfo) -> tuple[Observation, Chunk]:
    """One sample of a black picture, and the chunk that the model likes best for it."""
    obs = Observation(
        images={name: np.zeros((1, *size, 3), np.uint8) for name, size in info.cameras.items()},
        instructions=(info.tasks[0].instruction,),
        state=np.zeros((1, info.state_dim), np.float32) if info.state_dim else None,
    )
    return obs, model.sample_chunk(obs, Noise(0, "blank", [0], [0], [0]), True)
