"""Choice of the parallel strategy of a run's learners."""

from __future__ import annotations

from vla_rl.core.spec.sections import TrainSpec
from vla_rl.runtime.workers.learner.parallel.data_parallel import DataParallel
from vla_rl.toolkit.trainers.parallel import ParallelStrategy, SingleRank


def strategy_for(train: TrainSpec, device: str, world: int) -> ParallelStrategy:
    """Return the strategy of `world` learners, not yet prepared; a single learner never shards its model."""
    if world == 1:
        return SingleRank()
    if train.sharding == "full":
        from vla_rl.runtime.workers.learner.parallel.fsdp import FullyShardedParallel  # loads for a second

        return FullyShardedParallel(device, world)
    return DataParallel(world)
