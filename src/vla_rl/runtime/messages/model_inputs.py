"""Samples of a policy worker: model inputs with their ids. They stay with the policy that made them until a learner
needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from vla_rl.core.trainers import ModelInputs
from vla_rl.core.types import Array, Observation


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
    """Final observations of the samples in `final_ids`, [K]; None without such samples."""

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
