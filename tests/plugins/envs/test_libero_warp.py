"""LIBERO's tasks in batches on MuJoCo Warp, on its CPU device. `make libero-warp` runs these tests in an environment that
has the packages; elsewhere they are skipped. Its first run compiles kernels, which takes minutes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import load_spec
from vla_rl.core.types import ChunkResult
from vla_rl.plugins.envs.libero.warp.config import LiberoWarpConfig
from vla_rl.plugins.envs.libero.warp.env import LiberoWarpEnv, make_env
from vla_rl.runtime.start import run

pytest.importorskip("mujoco_warp", reason="mujoco_warp is not installed; make libero-warp runs this test")

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(1800)]

SPATIAL, OBJECT = 0, 1_000_000
"""First state ids of two suites."""
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (2, 2, 7)).astype(np.float32)
EVERYONE = np.ones(2, bool)


def build_env(num_envs: int = 2, **settings: Any) -> LiberoWarpEnv:
    config = {"suite": "libero_spatial", "tasks": (0,), "cameras": {}} | settings
    return make_env(LiberoWarpConfig(**config), EnvContext(num_envs=num_envs, chunk=2))


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoWarpEnv]:
    env = build_env()
    yield env
    env.close()


def begin(env: LiberoWarpEnv, *state_ids: int) -> None:
    env.reset(np.arange(len(state_ids)), np.array(state_ids), np.zeros(len(state_ids), np.int64))


def step(env: LiberoWarpEnv, active: Any = EVERYONE, actions: Any = ACTIONS) -> ChunkResult:
    return env.chunk_step(actions, np.asarray(active), True)


def batch_of(env: LiberoWarpEnv) -> Any:
    (batch,) = env._batches
    return batch


def positions(env: LiberoWarpEnv) -> np.ndarray:
    return batch_of(env).snapshot()["qpos"].numpy()


@pytest.fixture(scope="module")
def undisturbed(env: LiberoWarpEnv) -> np.ndarray:
    """Positions after a chunk from two official states."""
    begin(env, SPATIAL, SPATIAL + 1)
    step(env)
    return positions(env)


def test_an_action_moves_the_world_as_c_mujoco_does(env: LiberoWarpEnv) -> None:
    states = SPATIAL, SPATIAL + 500
    begin(env, *states)
    places = batch_of(env)._views["body_pos"]
    assert (places[0] != places[1]).any(), "fixtures of drawn states are elsewhere"
    step(env, actions=ACTIONS[:, :1])
    for world, state in enumerate(states):
        scene = env.host.place_scene(state)
        scene.step(ACTIONS[world, 0].astype(np.float64))
        assert positions(env)[world] == pytest.approx(scene._data.qpos, abs=2e-4)


def test_a_reset_leaves_the_other_world_alone(env: LiberoWarpEnv, undisturbed: np.ndarray) -> None:
    begin(env, SPATIAL, SPATIAL + 7)
    step(env, active=[True, False])
    env.reset(np.array([1]), np.array([SPATIAL + 1]), np.zeros(1, np.int64))
    assert (positions(env)[0] == undisturbed[0]).all()
    step(env, active=[False, True])
    assert (positions(env) == undisturbed).all()


def test_inactive_worlds_do_not_move(env: LiberoWarpEnv) -> None:
    begin(env, SPATIAL, SPATIAL + 1)
    before = batch_of(env).snapshot()
    assert {"qpos", "qvel", "qacc_warmstart", "ctrl", "goal_hand", "goal_rotation", "posture", "grip"} <= set(before)
    step(env, active=[False, True])
    result = step(env, active=[False, False])
    assert not result.executed.any() and not env.faults()
    after = batch_of(env).snapshot()
    assert all((before[name][0] == after[name][0]).all() for name in before)
    assert all((before[name][1] != after[name][1]).any() for name in ("qpos", "qvel", "ctrl", "goal_hand", "grip"))


def test_a_world_with_nan_breaks_alone(env: LiberoWarpEnv, undisturbed: np.ndarray) -> None:
    begin(env, SPATIAL, SPATIAL + 1)
    batch_of(env)._views["qvel"][0, 3] = torch.nan
    result = step(env)
    assert list(env.faults()) == [0] and not env.faults()
    assert result.executed.tolist() == [[False, False], [True, True]]
    assert result.obs.state.isfinite().all()
    assert (positions(env)[1] == undisturbed[1]).all()
    assert list(step(env, active=[True, False]).executed[0]) == [False, False]
    assert env.faults() == {0: []}, "it still has to be reset"
    begin(env, SPATIAL, SPATIAL + 1)
    assert step(env).executed.all() and not env.faults()
    assert (positions(env) == undisturbed).all()


def test_a_world_with_too_many_contacts_breaks_alone(undisturbed: np.ndarray) -> None:
    env = build_env(contacts=120)
    begin(env, SPATIAL, SPATIAL + 1)
    batch = batch_of(env)
    free = [
        int(batch.task.model.jnt_qposadr[batch.task.model.body_jntadr[body]]) for body in batch.task.things.values()
    ]
    heap = batch._views["qpos"][0, free[0] : free[0] + 3].clone()
    for address in free:
        batch._views["qpos"][0, address : address + 3] = heap
    result = step(env)
    (text,) = env.faults()[0]
    assert "raise env.contacts" in text and "120 a world" in text
    assert result.executed.tolist() == [[False, False], [True, True]]
    assert positions(env)[1] == pytest.approx(undisturbed[1], abs=1e-5)
    env.close()


def test_space_that_does_not_fit_the_start_is_refused() -> None:
    env = build_env(contacts=10)
    with pytest.raises(UserError, match=r"env.contacts is 10, and a task needs \d+ at the start"):
        begin(env, SPATIAL)
    env.close()


def test_another_simulator_continues_from_a_snapshot(env: LiberoWarpEnv) -> None:
    begin(env, SPATIAL, SPATIAL + 1)
    step(env)
    snapshot = env.snapshot()
    step(env)
    expected = positions(env)
    another = build_env()
    another.restore(snapshot)
    step(another)
    assert (positions(another) == expected).all()
    another.close()


def test_tasks_are_batches_of_one_process() -> None:
    env = build_env(suite=None, tasks=None, suites={"libero_spatial": (0, 1)})
    begin(env, SPATIAL, SPATIAL + 1000)
    assert [batch.task.task.index for batch in env._batches] == [0, 1]
    result = step(env)
    assert result.executed.all()
    assert result.obs.instructions == tuple(task.instruction for task in env.info.tasks)
    begin(env, SPATIAL + 1)
    assert len(env._batches) == 2, "the env keeps its world"
    env.reset(np.array([1]), np.array([SPATIAL]), np.zeros(1, np.int64))
    assert [batch.task.task.index for batch in env._batches] == [0, 1, 0], "its task's batch was full"
    env.close()


def test_success_ends_an_episode_and_its_world_stays(env: LiberoWarpEnv) -> None:
    begin(env, SPATIAL, SPATIAL + 1)
    batch = batch_of(env)
    bowl, plate = (batch.task.things[name] for name in ("akita_black_bowl_1", "plate_1"))
    model = batch.task.model
    addresses = [int(model.jnt_qposadr[model.body_jntadr[body]]) for body in (bowl, plate)]
    qpos = batch._views["qpos"]
    qpos[0, addresses[0] : addresses[0] + 3] = qpos[0, addresses[1] : addresses[1] + 3] + torch.tensor([0.0, 0.0, 0.01])
    still = np.zeros((2, 2, 7), np.float32)
    result = step(env, actions=still)
    assert result.terminated.any(1).tolist() == [True, False]
    (first,) = result.terminated[0].nonzero()[0]
    assert result.rewards[0].sum() == 1 and result.success.tolist() == [True, False]
    assert result.executed[0].tolist() == [number <= first for number in range(2)]
    ended = positions(env)[0]
    step(env, active=[False, True], actions=still)
    assert (positions(env)[0] == ended).all()


def test_images_are_oriented_as_liberos_in_each_world() -> None:
    env = build_env(cameras={"agentview": 32, "wrist": 48})
    obs = env.reset(np.arange(2), np.array([SPATIAL, SPATIAL + 1]), np.zeros(2, np.int64))
    assert {name: (image.shape, image.dtype) for name, image in obs.images.items()} == {
        "agentview": ((2, 32, 32, 3), torch.uint8),
        "wrist": ((2, 48, 48, 3), torch.uint8),
    }
    agentview = obs.images["agentview"].float()
    assert (agentview[0] != agentview[1]).any()
    warmth = (agentview[..., 0] - agentview[..., 2]).mean((0, 2))
    assert warmth[16:].mean() > 15 > 8 > warmth[:8].mean(), "the wooden table is below the grey wall"
    brightness = agentview.mean((0, 1, 3))
    assert brightness[:16].mean() > brightness[16:].mean() + 10, "the black cabinet is on the right"
    env.close()


def test_the_example_trains(tmp_path: Path) -> None:
    """Two worlds and two updates, as its comment says; the kernels of two cameras are compiled before."""
    example = Path(__file__).parents[3] / "examples" / "libero_warp_ppo.yaml"
    text = " ".join(line.lstrip("# ") for line in example.read_text("utf-8").splitlines() if line.startswith("#"))
    short = text.partition("already: ")[2].split()
    assert len(short) == 10
    run(load_spec(example, short), tmp_path / "run", resume=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss/value" in line for line in lines) == 2
