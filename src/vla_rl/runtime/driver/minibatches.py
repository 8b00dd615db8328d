"""From the samples of a rollout to the optimiser steps of each learner rank. Pure."""

from __future__ import annotations

import numpy as np
from attrs import field, frozen

from vla_rl.core.randomness import generator
from vla_rl.core.types import Array
from vla_rl.runtime.messages.learning import OptimizerStep


@frozen(kw_only=True, eq=False)
class RankShard:
    """What one learner rank trains on: samples in its own order, and its micro-batches of each optimiser step."""

    samples: Array
    """int64: indices into all samples."""
    steps: list[OptimizerStep] = field(factory=list)


def split_into_minibatches(
    ranks: Array,
    order: Array,
    light: dict[str, Array | None],
    *,
    world: int,
    seed: int,
    step: int,
    epochs: int,
    global_batch: int | None,
    micro_batch: int,
) -> list[RankShard]:
    """Optimiser steps of one iteration. Which sample is in which step depends on (seed, step, epoch) alone, never on
    the number of ranks; divisors count the whole step.

    Args:
        ranks: int64 [S], learner rank of each sample.   order: int64 [S], sort key of a sample within its rank.
    """
    count = len(ranks)
    size = global_batch or count
    counts, value_counts = light["counts"], light["value_counts"]
    assert counts is not None and value_counts is not None
    shares = [
        RankShard(samples=np.lexsort((order, ranks != rank))[: int((ranks == rank).sum())]) for rank in range(world)
    ]
    position = np.zeros(count, np.int64)
    for share in shares:
        position[share.samples] = np.arange(len(share.samples))
    for epoch in range(epochs):
        shuffled = generator(seed, "mini-batches", step, epoch).permutation(count)
        for start in range(0, count, size):
            members = shuffled[start : start + size]
            passes = -(-int(np.bincount(ranks[members]).max()) // micro_batch)
            for rank, share in enumerate(shares):
                own = position[members[ranks[members] == rank]]
                share.steps.append(
                    OptimizerStep(
                        micro_batches=tuple(own[i : i + micro_batch] for i in range(0, len(own), micro_batch)),
                        passes=passes,
                        divisor=max(float(counts[members].sum()), 1e-8),
                        value_divisor=max(float(value_counts[members].sum()), 1e-8),
                    )
                )
    return shares


def round_robin(count: int, world: int, micro_batch: int) -> list[list[Array]]:
    """Samples 0 .. count - 1 as micro-batches of each rank, int64 [B] each, in turn."""
    parts = [np.arange(start, min(start + micro_batch, count)) for start in range(0, count, micro_batch)]
    return [parts[rank::world] for rank in range(world)]
