"""Envs of LIBERO that share a process: one simulator a task, and the same bits as an env by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from vla_rl.core.contexts import EnvContext
from vla_rl.core.types import Array
from vla_rl.plugins.envs.libero import plugin
from vla_rl.plugins.envs.libero.config import LiberoConfig
from vla_rl.toolkit.envs.settings import SharedProcesses

pytestmark = [pytest.mark.sim, pytest.mark.slow]
pytest.importorskip("libero", reason="needs LIBERO: pip install -e '.[libero]'")

CHUNKS, CHUNK, SIZE = 3, 8, 64
INLINE = SharedProcesses(apart=False)


def make(num_envs: int, suite: str = "libero_spatial", tasks: tuple[int, ...] = (0,), **changes: Any) -> Any:
    config = {"suite": suite, "tasks": tasks, "cameras": {"agentview": SIZE, "wrist": SIZE}, "settle_steps": 3}
    return plugin.build(LiberoConfig(**config | changes), EnvContext(num_envs=num_envs, chunk=CHUNK))


def actions_of(state_id: int) -> Array:
    """Keyed by the state: float32 [CHUNKS, CHUNK, 7]."""
    return np.random.default_rng(state_id).uniform(-1, 1, (CHUNKS, CHUNK, 7)).astype(np.float32)


def start(env: Any, ids: list[int]) -> None:
    env_ids = np.arange(len(ids))
    env.reset(env_ids, np.array(ids), env_ids)


def play(env: Any, ids: list[int], chunk: int) -> list[tuple[Array, ...]]:
    """One chunk of each env. -> by env: images, state, rewards."""
    result = env.chunk_step(np.stack([actions_of(i)[chunk] for i in ids]), np.ones(len(ids), bool), False)
    images = result.obs.images
    return [
        (images["agentview"][env_id], images["wrist"][env_id], result.obs.state[env_id], result.rewards[env_id])
        for env_id in range(len(ids))
    ]


def simulator_states(env: Any) -> list[Array]:
    """Return the simulator state of each env in this process."""
    return [env.inline_env(env_id)._current_scene.simulator_state().copy() for env_id in range(env.num_envs)]


def same(one: tuple[Array, ...], other: tuple[Array, ...]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("suite", "task"),
    [("libero_spatial", 0), ("libero_object", 0), ("libero_goal", 0), ("libero_10", 0), ("libero_90", 5)],
)
def test_envs_that_take_turns_play_as_each_by_itself(suite: str, task: int) -> None:
    both = make(2, suite, (task,), processes=INLINE)
    ids = [both.reset_states(split)[5].id for split in ("eval", "train")]
    start(both, ids)
    shared = [(play(both, ids, chunk), simulator_states(both)) for chunk in range(CHUNKS)]
    assert both.inline_env(0)._current_scene is both.inline_env(1)._current_scene
    both.close()
    for env_id, state in enumerate(ids):
        alone = make(1, suite, (task,))
        start(alone, [state])
        for chunk, (seen, states) in enumerate(shared):
            assert same(seen[env_id], play(alone, [state], chunk)[0])
            assert np.array_equal(states[env_id], simulator_states(alone)[0])
        alone.close()


def test_an_env_that_breaks_leaves_the_others_where_they_are() -> None:
    """The scene of the broken env is built again. The others resume in it where they were, also after looking ahead."""
    env, calm = make(2, processes=INLINE), make(2, processes=INLINE)
    ids = [env.reset_states("train")[i].id for i in (0, 3)]
    for each in (env, calm):
        start(each, ids)
        play(each, ids, 0)
        each.expert_chunk()
    built = env.inline_env(1)._current_scene
    built._loop.step = None  # whoever steps in it breaks
    env_id = np.array([False, True])
    env.chunk_step(np.zeros((2, CHUNK, 7), np.float32), env_id, False)
    assert list(env.faults()) == [1]
    env.reset(np.array([1]), np.array(ids[1:]), np.array([1]))
    assert env.inline_env(0)._current_scene is not built
    assert same(play(env, ids, 1)[0], play(calm, ids, 1)[0])
    env.close()
    calm.close()


def test_tasks_that_no_env_plays_stay_within_the_memory_for_them() -> None:
    env = make(2, tasks=(0, 1, 2), memory_mib=0, processes=INLINE)
    first, second, third = (next(s.id for s in env.reset_states("eval") if s.task == t.name) for t in env.info.tasks)
    start(env, [first, second])
    scenes = env.inline_env(0)._scenes
    before = play(env, [first, second], 0)
    assert len(scenes._built) == 2, "both are played"
    env.reset(np.array([1]), np.array([third]), np.array([1]))
    assert [task.index for task in scenes._built] == [0, 2]
    start(env, [first, second])
    assert all(map(same, play(env, [first, second], 0), before))
    env.close()
    assert not scenes._built

    roomy = make(1, tasks=(0, 1), memory_mib=4000)
    start(roomy, [first])
    scene = roomy.inline_env(0)._current_scene
    start(roomy, [second])
    start(roomy, [first])
    assert roomy.inline_env(0)._current_scene is scene
    roomy.close()


def test_four_envs_in_one_process() -> None:
    """Four envs take little more memory than one, and no torch. All are replaced when their process is killed."""
    used = []
    for num_envs in (1, 4):
        env = make(num_envs, processes=SharedProcesses(apart=True, envs_per_process=4))
        ids = [state.id for state in env.reset_states("eval")[:num_envs]]
        start(env, ids)
        [pid] = set(env.pids)
        seen = [play(env, ids, chunk) for chunk in range(CHUNKS)]
        used.append(psutil.Process(pid).memory_full_info().uss / 2**20)
        if num_envs == 1:
            env.close()
    assert used[0] < 1000 and used[1] - used[0] < 3 * 20, used
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()

    start(env, ids)
    play(env, ids, 0)
    os.kill(pid, signal.SIGKILL)
    env.chunk_step(np.zeros((4, CHUNK, 7), np.float32), np.ones(4, bool), False)
    faults = env.faults()
    assert sorted(faults) == [0, 1, 2, 3] and len(faults[0]) == 1
    assert "envs 0 to 3: its process ended with exit code -9" in faults[0][0]
    start(env, ids)
    again = [play(env, ids, chunk) for chunk in range(CHUNKS)]
    assert all(same(*pair) for chunk in range(CHUNKS) for pair in zip(seen[chunk], again[chunk], strict=True))
    env.close()
