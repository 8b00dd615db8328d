"""Stream of a step's samples to the learners, in full micro-batches of all ranks."""

from __future__ import annotations

import numpy as np

from vla_rl.core.types import Array
from vla_rl.runtime.comm.backend import Ref
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.driver.collecting.assembler import RolloutSamples


class MicroBatchStream:
    """Samples that learners run their forward and backward passes on, while the step is still incomplete."""

    def __init__(self, fleet: Fleet, micro_batch: int) -> None:
        self.fleet = fleet
        self.micro_batch = micro_batch
        self.size = micro_batch * len(fleet.learners)
        """Samples of one micro-batch of every rank."""
        self.calls: list[Ref[None]] = []
        """Calls of the running step."""
        self._unsent: list[RolloutSamples] = []
        """Samples that no learner has yet: too few for a micro-batch of every rank."""

    def queue_samples(self, samples: RolloutSamples) -> None:
        """Add samples, and send as many full micro-batches of every rank as there are. Does not wait."""
        self._unsent.append(samples)
        count = sum(map(len, self._unsent)) // self.size * self.size
        if count:
            unsent = RolloutSamples.concat(self._unsent)
            self._send_samples(unsent.take(slice(count)))
            self._unsent = [unsent.take(slice(count, None))]

    def send_last(self, samples: RolloutSamples) -> None:
        """Send the last samples of the step, with those that are left. Does not wait."""
        self._send_samples(RolloutSamples.concat([*self._unsent, samples]))

    def reset(self) -> None:
        """Forget the step, which is over."""
        self.calls = []
        self._unsent = []

    def _send_samples(self, samples: RolloutSamples) -> None:
        """Send samples to the learners, which run their passes as soon as they are free."""
        batches_of_ranks = round_robin(len(samples), len(self.fleet.learners), self.micro_batch)
        passes = max(map(len, batches_of_ranks))
        first = not self.calls
        for learner, batches in zip(self.fleet.learners, batches_of_ranks, strict=True):
            shard = samples.take(np.concatenate([np.zeros(0, np.int64), *batches]))
            ends = np.cumsum([len(batch) for batch in batches])[:-1]
            micro_batches = np.split(np.arange(len(shard)), ends) if batches else []
            method = LearnerInterface.forward_backward
            version = self.fleet.version
            self.calls.append(learner.call(method, version, shard.refs, shard.fields, micro_batches, passes, first))


def round_robin(count: int, world: int, micro_batch: int) -> list[list[Array]]:
    """Distribute samples 0 .. count - 1 round-robin: micro-batches of each rank, int64 [B] each."""
    parts = [np.arange(start, min(start + micro_batch, count)) for start in range(0, count, micro_batch)]
    return [parts[rank::world] for rank in range(world)]
