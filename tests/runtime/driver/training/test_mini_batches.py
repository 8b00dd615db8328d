"""Optimiser steps of a rollout: their number or their size is given, and every sample is in one step of each epoch."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.core.spec.sections import TrainSpec
from vla_rl.runtime.driver.training.update import split_into_minibatches


def steps_of(count: int, world: int = 1, **settings: int) -> list[list[int]]:
    """Samples of each optimiser step, over all ranks."""
    train = TrainSpec(steps=1, lr=1e-4, micro_batch=2, **settings)
    fields = {"counts": np.ones(count, np.float32), "value_counts": np.ones(count, np.float32)}
    ranks = np.arange(count) % world
    shards = split_into_minibatches(ranks, np.arange(count), fields, world=world, seed=0, step=1, train=train)
    parts = [
        shard.samples[np.concatenate(step.micro_batches or [[]]).astype(int)]
        for shard in shards
        for step in shard.steps
    ]
    each = len(shards[0].steps)
    return [sorted(np.concatenate(parts[index::each]).tolist()) for index in range(each)]


@pytest.mark.parametrize("count", [40, 37, 23, 4])
def test_shorter_episodes_make_steps_smaller_and_not_fewer(count: int) -> None:
    steps = steps_of(count, mini_batches=4, epochs=3)
    assert len(steps) == 12
    for epoch in range(3):
        parts = steps[4 * epoch : 4 * epoch + 4]
        assert sorted(one for part in parts for one in part) == list(range(count))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    assert steps[:4] != steps[4:8], "each epoch draws anew"


def test_a_step_is_not_empty() -> None:
    assert [len(step) for step in steps_of(3, mini_batches=8)] == [1, 1, 1]


def test_steps_do_not_depend_on_the_number_of_ranks() -> None:
    assert steps_of(23, world=3, mini_batches=4) == steps_of(23, mini_batches=4)


def test_a_global_batch_gives_the_size_and_the_rest_is_the_last_step() -> None:
    assert [len(step) for step in steps_of(23, global_batch=10)] == [10, 10, 3]
    assert [len(step) for step in steps_of(23)] == [23]
