"""Packed numbers: the identity of a sample, and ranges of numbers that must not overlap. All arithmetic on ids."""

from __future__ import annotations

import numpy as np

from vla_rl.core.types import Array


class SampleId:
    """Identity of a sample (one env's chunk step) among the samples of one policy worker. An id is an int64 that holds
    the number of the inference that made the sample, and the sample's position in that inference's batch. Ids ascend
    with the inferences, then with the positions."""

    POSITIONS = 1 << 20
    """Positions of one inference: more envs than a policy acts for at once. 2^43 inferences are left in an int64."""

    @staticmethod
    def pack(inference: int, positions: int | Array) -> Array:
        """Return the ids, int64 [B], of these positions of one inference."""
        return np.asarray(inference * SampleId.POSITIONS + positions, np.int64)

    @staticmethod
    def unpack(ids: Array) -> tuple[Array, Array]:
        """Return (inferences, positions) of ids, int64 [B] each."""
        inferences, positions = np.divmod(ids, SampleId.POSITIONS)
        return inferences, positions

    @staticmethod
    def inference_keys(ids: Array, workers: Array) -> Array:
        """Return int64 [B], equal for samples of one inference of one policy worker.

        Args:
            ids, workers: int64 [B]: the samples' ids, and the policy workers that hold them.
        """
        inferences, _ = SampleId.unpack(ids)
        # Mixed radix: workers count from 0 to their maximum, so each (inference, worker) has a unique number.
        combined: Array = inferences * (workers.max(initial=0) + 1) + workers
        return combined


DEMONSTRATIONS = 1 << 20
"""Episode number (2^20) that keys the reset states of demonstrations: above those of a ticket's own episodes, which
count from zero, so that demonstrations draw other states than rollouts."""
IMAGINED_EPISODES = 1 << 21
"""Episode number (2^21) that keys imagined starts; apart from `DEMONSTRATIONS` and from real episodes."""
IMAGINED_GROUPS = 1 << 40
"""Number of the first imagined group (2^40): no real group or ticket reaches it. Imagined tickets are numbered from
this times the group size, which an int64 holds for groups of up to 2^22."""
