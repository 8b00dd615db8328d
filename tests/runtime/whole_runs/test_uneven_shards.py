"""Ranks that train on what other workers made, because a filter dropped their own: no rank waits for another forever,
and every sample stays with its advantage."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_runs import (
    KL_APART,
    LOSS_APART,
    advance,
    assert_no_heavy_rows,
    finish,
    play,
    scripted_spec,
)

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import start

ONE_WORKER = np.arange(4)
"""Columns of the groups that the first worker's rows play, of 12 rows on three workers."""
MOST_OF_ONE = np.arange(5)
"""`ONE_WORKER` and a column of the second worker: of three ranks, the second trains on its own and on others' samples."""
PLACEMENTS = {
    "two collocated": {"type": "collocated", "workers": 2},
    "three collocated": {"type": "collocated", "workers": 3},
    "hybrid": {"type": "hybrid", "sim": "0-1", "policy": "2-3", "learner": "0-3"},
}


def train_on(keep, **changes):
    """Metrics of two updates, each on the columns `keep` of its rollout; nothing stays in a store."""
    spec = scripted_spec(
        env={"num_envs": 12},
        rollout={"episodes": 12, "group_size": 4},
        algorithm={"type": "grpo", "filter_identical": False},
        train={"global_batch": 12},
        **changes,
    )
    runtime = start(parse_spec(spec))
    try:
        metrics = []
        for step in (1, 2):
            metrics.append(advance(runtime, step, keep)[1])
            assert_no_heavy_rows(runtime)
        return metrics
    finally:
        runtime.workers.close()


@pytest.mark.ray
@pytest.mark.parametrize("keep", [ONE_WORKER, MOST_OF_ONE], ids=["of one worker", "of two workers"])
@pytest.mark.parametrize("case", PLACEMENTS)
def test_ranks_share_what_one_worker_made(case, keep):
    expected = train_on(keep)
    got = train_on(keep, runtime={"backend": "ray", "deadline_s": 60}, placement=PLACEMENTS[case])
    for a, b in zip(expected, got, strict=True):
        assert a["update/samples"] == b["update/samples"]
        for name, apart in (("loss/total", LOSS_APART), ("policy/approx_kl", KL_APART), ("policy/grad_norm", 1e-5)):
            assert a[name] == pytest.approx(b[name], abs=apart), name


def test_nothing_is_kept_of_a_rollout_that_is_not_trained_on():
    runtime = start(parse_spec(scripted_spec()))
    try:
        play(runtime, 1)
        finish(runtime, trained=False)
        assert_no_heavy_rows(runtime)
    finally:
        runtime.workers.close()
