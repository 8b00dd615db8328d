"""A chunk played action by action does what it does at once, and shows more."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.core.catalogue import load
from vla_rl.core.types import Context, to_numpy
from vla_rl.runtime.workers.env.one_by_one import one_by_one

ROWS, CHUNK = 6, 4


def tabletop():
    plugin = load("env", "tabletop")
    return plugin.build(plugin.config(image_size=16), Context(num_envs=ROWS, chunk=CHUNK))


@pytest.mark.parametrize("stop_at_end", [True, False])
def test_nothing_but_the_frames_between_is_new(stop_at_end):
    whole, single = tabletop(), tabletop()
    rows, ids = np.arange(ROWS), np.array([s.id for s in whole.reset_states("train")[:ROWS]])
    for env in (whole, single):
        env.reset(rows, ids, ids)
    seen, ended = [], np.zeros(ROWS, bool)
    for turn in range(4):
        active = ~ended if stop_at_end else np.ones(ROWS, bool)
        active[5] = False
        actions = to_numpy(whole.expert_chunk()).astype(np.float32)
        wanted = whole.chunk_step(actions, active.copy(), stop_at_end)
        found, faults = one_by_one(single, actions, active, stop_at_end, lambda rows, obs: seen.append((rows, obs)))
        for name in ("rewards", "terminated", "truncated", "executed"):
            assert np.array_equal(getattr(found, name), to_numpy(getattr(wanted, name))), (turn, name)
        assert np.array_equal(found.success[active], to_numpy(wanted.success)[active]) and not faults
        for camera, images in wanted.obs.images.items():
            assert np.array_equal(to_numpy(found.obs.images[camera])[active], to_numpy(images)[active]), turn
        assert np.array_equal(to_numpy(found.obs.state)[active], to_numpy(wanted.obs.state)[active])
        assert sum(len(rows) for rows, _ in seen) == to_numpy(wanted.executed).sum()
        ended |= (to_numpy(wanted.terminated) | to_numpy(wanted.truncated)).any(1)
        seen.clear()
    assert ended.any(), "no episode ended within a chunk"
