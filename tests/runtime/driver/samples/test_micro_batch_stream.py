"""Test which samples of a streamed step make up which micro-batch."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.runtime.driver.training.streaming_update import round_robin


def test_micro_batches_go_round():
    ranks = round_robin(19, world=2, micro_batch=4)
    assert [[batch.tolist() for batch in own] for own in ranks] == [
        [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18]],
        [[4, 5, 6, 7], [12, 13, 14, 15]],
    ]


@pytest.mark.parametrize("count", [0, 1, 5, 24, 25])
def test_every_sample_once(count):
    ranks = round_robin(count, world=3, micro_batch=8)
    assert sorted(np.concatenate([[], *(batch for own in ranks for batch in own)]).tolist()) == list(range(count))
    assert max((len(batch) for own in ranks for batch in own), default=0) <= 8
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
