"""A chunk played action by action does what it does at once, and shows more."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.core.catalogue import load
from vla_rl.core.contexts import EnvContext
from vla_rl.core.types import to_numpy
from vla_rl.runtime.workers.env.simulator import one_by_one

ENVS, CHUNK = 6, 4


def tabletop():
    plugin = load("env", "tabletop")
    return plugin.build(plugin.config(image_size=16), EnvContext(num_envs=ENVS, chunk=CHUNK))


@pytest.mark.parametrize("stop_at_end", [True, False])
def test_nothing_but_the_frames_between_is_new(stop_at_end):
    whole, single = tabletop(), tabletop()
    env_ids, ids = np.arange(ENVS), np.array([s.id for s in whole.reset_states("train")[:ENVS]])
    for env in (whole, single):
        env.reset(env_ids, ids, ids)
    seen, ended = [], np.zeros(ENVS, bool)
    for turn in range(4):
        active = ~ended if stop_at_end else np.ones(ENVS, bool)
        active[5] = False
        actions = to_numpy(whole.expert_chunk()).astype(np.float32)
        wanted = whole.chunk_step(actions, active.copy(), stop_at_end)
        found, faults = one_by_one(
            single, actions, active, stop_at_end, [lambda env_ids, obs: seen.append((env_ids, obs))]
        )
        for name in ("rewards", "terminated", "truncated", "executed"):
            assert np.array_equal(getattr(found, name), to_numpy(getattr(wanted, name))), (turn, name)
        assert np.array_equal(found.success[active], to_numpy(wanted.success)[active]) and not faults
        for camera, images in wanted.obs.images.items():
            assert np.array_equal(to_numpy(found.obs.images[camera])[active], to_numpy(images)[active]), turn
        assert np.array_equal(to_numpy(found.obs.state)[active], to_numpy(wanted.obs.state)[active])
        assert sum(len(env_ids) for env_ids, _ in seen) == to_numpy(wanted.executed).sum()
        ended |= (to_numpy(wanted.terminated) | to_numpy(wanted.truncated)).any(1)
        seen.clear()
    assert ended.any(), "no episode ended within a chunk"
