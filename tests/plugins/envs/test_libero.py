"""Real LIBERO: libero_spatial task 0 at 64 pixels, one env in this process unless a test says otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fork_server import ForkServer
from vla_rl.core.contexts import CheckContext, EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import Problems
from vla_rl.core.types import Array, ChunkResult
from vla_rl.plugins.envs.libero import plugin
from vla_rl.plugins.envs.libero.checks import check_tasks
from vla_rl.plugins.envs.libero.config import LiberoConfig
from vla_rl.plugins.envs.libero.expert import find_recipe
from vla_rl.plugins.envs.libero.suites import Suite

pytestmark = pytest.mark.sim
pytest.importorskip("libero", reason="needs LIBERO: pip install -e '.[libero]'")

SIZE, CHUNK = 64, 8
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (1, 2 * CHUNK, 7)).astype(np.float32)
ONE_ENV, ON = np.array([0]), np.array([True])


def make(num_envs: int = 1, **changes: Any) -> Any:
    config = {"suite": "libero_spatial", "tasks": (0,), "cameras": {"agentview": SIZE, "wrist": SIZE}} | changes
    return plugin.build(LiberoConfig(**config), EnvContext(num_envs=num_envs, chunk=CHUNK))


def test_instructions_are_those_that_the_field_evaluates_with() -> None:
    """Names of files for LIBERO's own suites; for LIBERO-PRO's other words and other tasks what the files say, without
    which a policy would be asked for the old task and judged by the new one."""
    words = {name: Suite(f"libero_spatial{name}").tasks[3].instruction for name in ("", "_object", "_lan", "_task")}
    assert words[""] == words["_object"] == "pick up the black bowl on the cookie box and place it on the plate"
    assert words["_lan"] == "lift black bowl from cookie box and put it on plate"
    assert words["_task"] == "pick the akita black bowl on the top of the cabinet and place it on the plate"


@pytest.mark.parametrize(
    ("suite", "message"),
    [("libero_goal_temp", "lacks 10 of 10 files, such as .*libero_goal_temp.*bddl"), ("libero_100", "has no tasks")],
)
def test_suites_without_files_are_refused_when_a_spec_is_checked(suite: str, message: str) -> None:
    with pytest.raises(Problems, match=f"lists the suite {suite}, and {message}.*; choose another suite"):
        check_tasks(LiberoConfig(suite=suite, tasks=None), CheckContext())


def test_a_log_file_of_another_user_is_not_opened(tmp_path, bare_fork_server):
    """robosuite logs to /tmp/robosuite.log, which belongs to the first user of a machine; the others could not import it."""
    script = (
        "import os, sys\n"
        "sys.dont_write_bytecode = True\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(args[0]) if event == 'open' else None)\n"
        "import vla_rl.plugins.envs.libero.scene\n"
        "print([name for name in opened if str(name).endswith('robosuite.log')])\n"
    )
    ended = bare_fork_server.run_python("-c", script, check=True, cwd=tmp_path)
    assert ended.stdout == "[]\n"


@pytest.fixture(scope="module")
def official() -> tuple[dict[str, Array], Array, list[bool]]:
    """The official environment and evaluation protocol from official state 3: last observation, simulator state."""
    os.environ.setdefault("MUJOCO_GL", "egl")
    from vla_rl.plugins.envs.libero.scene import silence_packages

    with silence_packages():
        from libero.libero.envs import OffScreenRenderEnv

    suite = Suite("libero_spatial")
    env = OffScreenRenderEnv(bddl_file_name=suite.tasks[0].bddl_file, camera_heights=SIZE, camera_widths=SIZE)
    env.seed(0)
    env.reset()
    env.set_init_state(suite.initial_states(0)[3])
    for _ in range(10):
        env.step([0.0] * 6 + [-1.0])
    done = []
    for action in ACTIONS[0]:
        observation, _, success, _ = env.step(np.asarray(action, np.float64))
        done.append(bool(success))
    state = env.get_sim_state().copy()
    env.close()
    return dict(observation), state, done


@pytest.fixture(scope="module")
def env(official: Any) -> Iterator[Any]:
    env = make()
    yield env
    env.close()


def play(env: Any, state_id: int) -> ChunkResult:
    env.reset(ONE_ENV, np.array([state_id]), ONE_ENV)
    env.chunk_step(ACTIONS[:, :CHUNK], ON, False)
    return env.chunk_step(ACTIONS[:, CHUNK:], ON, False)


def simulator_state(env: Any) -> Array:
    return env_of(env)._current_scene._control.get_sim_state()


def env_of(env: Any) -> Any:
    """The simulator of a batch of one, which lives in this process."""
    return env.inline_env(0)


def processes_of(env: Any) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in env.pids]


def same(one: Any, other: Any) -> bool:
    images = all(np.array_equal(one.images[name], other.images[name]) for name in one.images)
    return images and np.array_equal(one.state, other.state)


def test_an_episode_equals_the_official_one_bit_for_bit(env: Any, official: Any) -> None:
    observation, state, done = official
    result = play(env, 3)
    assert np.array_equal(simulator_state(env), state)
    assert np.array_equal(result.obs.images["agentview"][0], observation["agentview_image"][::-1, ::-1])
    assert np.array_equal(result.obs.images["wrist"][0], observation["robot0_eye_in_hand_image"][::-1, ::-1])
    from robosuite.utils.transform_utils import quat2axisangle

    rotation = quat2axisangle(observation["robot0_eef_quat"])
    wanted = np.concatenate([observation["robot0_eef_pos"], rotation, observation["robot0_gripper_qpos"]])
    assert np.array_equal(result.obs.state[0], wanted.astype(np.float32))
    assert result.terminated[0].tolist() == done[CHUNK:] == [False] * CHUNK
    assert result.executed.all() and not result.truncated.any()


@pytest.mark.parametrize("split", ["eval", "train"])
def test_a_state_gives_the_same_episode_whatever_went_before(env: Any, split: str) -> None:
    states = [state.id for state in env.reset_states(split)]
    first = play(env, states[5])
    play(env, states[7])
    env.chunk_step(-ACTIONS[:, :CHUNK], ON, False)
    again = play(env, states[5])
    assert same(first.obs, again.obs)
    assert not same(first.obs, play(env, states[7]).obs)


def test_splits_share_no_scene(env: Any) -> None:
    train, evaluation = env.reset_states("train"), env.reset_states("eval")
    assert (len(train), len(evaluation)) == (200, 50)
    assert not {state.id for state in train} & {state.id for state in evaluation}
    assert {state.task for state in train + evaluation} == {env.info.tasks[0].name}
    env_id, drawn = env_of(env), []
    official = Suite("libero_spatial").initial_states(0)
    for state in train[:20]:
        env_id._current_scene.place(env_id._draw_seed(state.id), None, 0)
        drawn.append(simulator_state(env))
    things = np.concatenate([np.array(drawn), official])[:, 10:]  # time, seven joints and two fingers come first
    distances = np.linalg.norm(things[:20, None] - things[None], axis=-1)
    distances[np.arange(20), np.arange(20)] = np.inf
    assert distances.min() > 1e-3  # metres: no two alike, neither drawn nor official
    assert np.abs(things[:20].mean(0) - official[:, 10:].mean(0)).max() < 0.05  # and from the same regions


def test_the_expert_solves_a_train_state_and_leaves_no_trace(env: Any) -> None:
    state, chunks = env.reset_states("train")[0].id, []
    env.reset(ONE_ENV, np.array([state]), ONE_ENV)
    while len(chunks) * CHUNK < env.info.tasks[0].max_steps:
        chunks.append(env.expert_chunk())
        result = env.chunk_step(chunks[-1], ON, True)
        if result.terminated.any():
            break
    steps = int(result.executed.sum())
    assert result.success[0] and result.rewards[0, steps - 1] == 1.0
    assert chunks[0].shape == (1, CHUNK, 7) and chunks[0].dtype == np.float32
    assert result.executed[0].tolist() == [i < steps for i in range(CHUNK)], "stops at its end"
    assert result.terminated[0].tolist() == [i == steps - 1 for i in range(CHUNK)]

    env.reset(ONE_ENV, np.array([state]), ONE_ENV)
    for chunk in chunks:
        replay = env.chunk_step(chunk, ON, True)
    assert same(result.obs, replay.obs), "the rehearsal of the expert changed the episode"

    idle = env.chunk_step(chunks[-1], ~ON, True)
    assert not idle.executed.any() and not idle.rewards.any() and same(idle.obs, replay.obs)
    running_on = env.chunk_step(np.zeros((1, CHUNK, 7), np.float32), ON, False)
    assert running_on.executed.all() and running_on.terminated.any()


def test_envs_in_processes() -> None:
    """Two envs, one reset later than the other; Ctrl-C does not reach them; a dead one is named and replaced."""
    env = make(num_envs=2)
    try:
        both, actions = np.array([0, 1]), np.repeat(ACTIONS[:, :CHUNK], 2, 0)
        env.reset(both, np.array([3, 4]), both)
        processes = processes_of(env)
        os.kill(processes[0].pid, signal.SIGINT)
        moved = env.chunk_step(actions, np.array([True, False]), False)
        assert moved.executed.tolist() == [[True] * CHUNK, [False] * CHUNK]
        again = env.reset(np.array([1]), np.array([3]), np.array([0]))
        assert len(again) == 1
        assert same(env.reset(np.array([0]), np.array([3]), np.array([9])), again), "envs differ"
        assert env.faults() == {}
        os.kill(processes[1].pid, signal.SIGKILL)
        broken = env.chunk_step(actions, np.array([True, True]), False)
        assert broken.executed.tolist() == [[True] * CHUNK, [False] * CHUNK]
        assert list(env.faults()) == [1] and env.faults() == {}
        assert same(env.reset(np.array([1]), np.array([3]), np.array([0])), again), "its replacement differs"
        processes = processes_of(env)
    finally:
        env.close()
        env.close()
    assert not any(process.is_running() for process in processes)


ORPHANS = """
import threading
import time
import numpy as np
from tests.plugins.envs.test_libero import make, processes_of

if __name__ == "__main__":
    env = make(num_envs=2)
    threading.Thread(target=env.reset, args=(np.arange(2), np.arange(2), np.arange(2)), daemon=True).start()
    while not all(env.pids):
        time.sleep(0.05)
    print(*(process.pid for process in processes_of(env)), flush=True)
    time.sleep(60)
"""


def test_envs_die_with_a_killed_owner_while_they_build(tmp_path: Path, fork_server: ForkServer) -> None:
    script = tmp_path / "owner.py"
    script.write_text(ORPHANS)
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), *sys.path])
    owner = fork_server.start_python(script, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path})
    assert owner.stdout is not None
    env_ids = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(env_ids) == 2
    time.sleep(1.0)
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(env_ids, timeout=10)
    assert not alive


def test_step_limits_and_errors_of_a_spec() -> None:
    env = make(tasks=(5, 1))
    assert [task.max_steps for task in env.info.tasks] == [220, 220]
    assert env.info.tasks[1].instruction.startswith("pick up the black bowl")
    assert env.info.cameras == {"agentview": (SIZE, SIZE), "wrist": (SIZE, SIZE)}
    with pytest.raises(
        UserError, match=r"no scripted expert for libero_spatial task 5 .* it has for: libero_spatial 0, "
    ):
        find_recipe("libero_spatial", 5, env.info.tasks[0].instruction)
    with pytest.raises(UserError, match=r"no LIBERO suite 'libero_spatail'; did you mean 'libero_spatial'\?"):
        make(suite="libero_spatail")
    with pytest.raises(UserError, match=r"libero_spatial has tasks 0 to 9; asked for 10"):
        make(tasks=(0, 10))
    with pytest.raises(
        UserError, match=r"libero_goal has no task 'put_the_bowl_on_the_stov'; did you mean 'put_the_bo"
    ):
        make(suite="libero_goal", tasks=("put_the_bowl_on_the_stov",))
    with pytest.raises(UserError, match="is named twice"):
        make(tasks=(1, "pick_up_the_black_bowl_next_to_the_ramekin_and_place_it_on_the_plate"))
    with pytest.raises(ValueError, match="no libero camera 'head'; cameras: agentview, wrist"):
        make(cameras={"head": 64})
    with pytest.raises(ValueError, match="camera 'wrist' has 0 pixels"):
        make(cameras={"wrist": 0})


def test_suites_mix() -> None:
    env = make(suite=None, tasks=None, suites={"libero_goal": None, "libero_90": (5,)}, step_limits="simplevla")
    assert len(env.info.tasks) == 11 and {task.max_steps for task in env.info.tasks} == {512}
    train, evaluation = env.reset_states("train"), env.reset_states("eval")
    assert (len(train), len(evaluation)) == (11 * 200, 11 * 50)
    assert not {state.id for state in train} & {state.id for state in evaluation}
    alone = make(suite="libero_90", tasks=(5,))
    assert [s.id for s in alone.reset_states("eval")] == [s.id for s in evaluation[-50:]], "ids depend on the mixture"


def test_training_on_official_states_is_said() -> None:
    env = make(train_states="official", fast_render=True)
    assert env.reset_states("train") == env.reset_states("eval")
    assert [note.split(":")[0] for note in env.info.notes] == ["train_states", "fast_render"]
    assert make().info.notes == ()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"suite": None}, r"give one of suite \(and tasks\), suites, .* and plus"),
        ({"suites": {"libero_10": None}}, r"give one of suite \(and tasks\), suites, .* and plus"),
        ({"suite": None, "suites": {"libero_10": None}}, "leave tasks out"),
        ({"train_states": 0}, "give 1 to 500, or official"),
    ],
)
def test_settings_that_contradict_each_other(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**keys)
