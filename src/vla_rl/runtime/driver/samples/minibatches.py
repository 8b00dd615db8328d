"""Split of a rollout's samples into the optimiser steps of each learner rank. Pure functions."""

from __future__ import annotations

import numpy as np
from attrs import field, frozen

from vla_rl.core.randomness import generator
from vla_rl.core.trainers import OptimizerStep
from vla_rl.core.types import Array


@frozen(kw_only=True, eq=False)
class RankShard:
    """Shard of one learner rank: its samples in the rank's own order, and its micro-batches of each optimiser step."""

    samples: Array
    """Indices into all samples, int64."""
    steps: list[OptimizerStep] = field(factory=list)


def split_into_minibatches(
    ranks: Array,
    order: Array,
    fields: dict[str, Array | None],
    *,
    world: int,
    seed: int,
    step: int,
    epochs: int,
    global_batch: int | None,
    micro_batch: int,
) -> list[RankShard]:
    """Split the samples into the optimiser steps of one iteration.

    Which sample is in which step depends on (seed, step, epoch) alone, never on the number of ranks. Divisors count all
    ranks of a step.

    Args:
        ranks: int64 [S], learner rank of each sample.
        order: int64 [S], sort key of a sample within its rank.
        fields: batch fields of the samples, [S, ...], with their counts.
    """
    count = len(ranks)
    size = global_batch or count
    counts = fields["counts"]
    value_counts = fields["value_counts"]
    assert counts is not None and value_counts is not None
    shards = [
        RankShard(samples=np.lexsort((order, ranks != rank))[: int((ranks == rank).sum())]) for rank in range(world)
    ]
    position = np.zeros(count, np.int64)
    for shard in shards:
        position[shard.samples] = np.arange(len(shard.samples))
    for epoch in range(epochs):
        shuffled = generator(seed, "mini-batches", step, epoch).permutation(count)
        for start in range(0, count, size):
            members = shuffled[start : start + size]
            passes = -(-int(np.bincount(ranks[members]).max()) // micro_batch)
            for rank, shard in enumerate(shards):
                shard_members = position[members[ranks[members] == rank]]
                shard.steps.append(
                    OptimizerStep(
                        micro_batches=tuple(
                            shard_members[i : i + micro_batch] for i in range(0, len(shard_members), micro_batch)
                        ),
                        passes=passes,
                        divisor=max(float(counts[members].sum()), 1e-8),
                        value_divisor=max(float(value_counts[members].sum()), 1e-8),
                    )
                )
    return shards


def round_robin(count: int, world: int, micro_batch: int) -> list[list[Array]]:
    """Distribute samples 0 .. count - 1 round-robin: micro-batches of each rank, int64 [B] each."""
    parts = [np.arange(start, min(start + micro_batch, count)) for start in range(0, count, micro_batch)]
    return [parts[rank::world] for rank in range(world)]
