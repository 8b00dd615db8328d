"""Model inputs of a rollout: what a model saw and how it chose. They stay with the policy that made them until a
learner needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import frozen

from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.randomness import Noise
from vla_rl.core.types import Array, ArrayOrTensor, Chunk, EnvInfo, Observation, concat, pick, to_numpy


@frozen(kw_only=True, eq=False)
class ModelInputs:
    """B samples: observations, chosen actions [B, C, A] and the model's own extras, batch first."""

    obs: Observation
    actions: ArrayOrTensor
    extras: Mapping[str, ArrayOrTensor]

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
        extras = {name: to_numpy(tensor) for name, tensor in self.extras.items()}
        return ModelInputs(obs=self.obs.numpy(), actions=to_numpy(self.actions), extras=extras)

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
    """Return the bytes of an observation's arrays. Instructions do not count: many envs share one string."""
    arrays = [*obs.images.values(), obs.state, obs.steps]
    return sum(int(array.nbytes) for array in arrays if array is not None)


@frozen(kw_only=True, eq=False)
class SampleBatch:
    """Samples of one policy worker, on their way to a learner."""

    sample_ids: Array
    """int64 [B], ascending."""
    inputs: ModelInputs
    final_ids: Array
    """Ids of those samples that have a final observation, int64 [K], ascending; empty where values are never
    recomputed.
    """
    finals: Observation | None
    """Final observations of the samples in `final_ids`, [K]; None where there is none."""

    def numpy(self) -> SampleBatch:
        finals = None if self.finals is None else self.finals.numpy()
        return SampleBatch(
            sample_ids=self.sample_ids, inputs=self.inputs.numpy(), final_ids=self.final_ids, finals=finals
        )

    @staticmethod
    def concat(parts: Sequence[SampleBatch]) -> SampleBatch:
        finals = [part.finals for part in parts if part.finals is not None]
        return SampleBatch(
            sample_ids=np.concatenate([part.sample_ids for part in parts]),
            inputs=ModelInputs.concat([part.inputs for part in parts]),
            final_ids=np.concatenate([part.final_ids for part in parts]),
            finals=Observation.concat(finals) if finals else None,
        )


def dummy_sample(model: VLAModel, info: EnvInfo) -> tuple[Observation, Chunk]:
    """Return one sample with black images, and the chunk that the model prefers for it (greedy), for dummy batches."""
    obs = Observation(
        images={name: np.zeros((1, *size, 3), np.uint8) for name, size in info.cameras.items()},
        instructions=(info.tasks[0].instruction,),
        state=np.zeros((1, info.state_dim), np.float32) if info.state_dim else None,
    )
    return obs, model.sample_chunk(obs, Noise(0, "blank", [0], [0], [0]), True)
