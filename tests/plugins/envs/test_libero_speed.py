"""LIBERO's own stepping against the official environment: the same bits in less time, and no memory lost."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.envs.libero import plugin
from vla_rl.plugins.envs.libero.config import LiberoConfig
from vla_rl.plugins.envs.libero.drawing import egl_device

pytest.importorskip("libero", reason="needs LIBERO: pip install -e '.[libero]'")

CHUNKS, CHUNK, SIZE = 3, 8, 64
FILMED = {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"}
STILL = [0.0] * 6 + [-1.0]


class Pair(NamedTuple):
    official: Any
    scene: Any
    states: Array


def build(suite_name: str, index: int, **changes: Any) -> Any:
    """-> scene, suite."""
    os.environ.setdefault("MUJOCO_GL", "egl")
    from vla_rl.plugins.envs.libero.scene import LiberoScene
    from vla_rl.plugins.envs.libero.suites import Suite

    suite = Suite(suite_name)
    return LiberoScene(suite.tasks[index], dict.fromkeys(FILMED, SIZE), **changes), suite


def pair_of(suite_name: str, index: int) -> Pair:
    scene, suite = build(suite_name, index)
    from libero.libero.envs import OffScreenRenderEnv

    official = OffScreenRenderEnv(bddl_file_name=suite.tasks[index].bddl_file, camera_heights=SIZE, camera_widths=SIZE)
    return Pair(official, scene, suite.initial_states(index))


def start(pair: Pair, state: Array) -> None:
    """The official protocol: a new model, an initial state, ten steps without motion."""
    film(pair.official, False)
    pair.official.seed(0)
    pair.official.reset()
    show(pair.official)
    pair.official.set_init_state(state)
    for _ in range(10):
        pair.official.step(STILL)
    pair.scene.place(0, state, 10)


def film(official: Any, on: bool) -> None:
    """Switch the cameras, whose images take nearly all of the time, without setting their clocks back."""
    observables = official.env._observables
    for name in FILMED.values():
        clock = {key: vars(observables["robot0_eef_pos"])[key] for key in ("_time_since_last_sample", "_sampled")}
        vars(observables[name]).update(clock, _enabled=on, _active=on)


def show(official: Any) -> None:
    """Draw in its own GL context: it would take that of whoever drew last."""
    official.sim._render_context_offscreen.gl_ctx.make_current()


def assert_equal(pair: Pair, seen: dict[str, Array]) -> None:
    assert np.array_equal(pair.scene.simulator_state(), pair.official.get_sim_state())
    assert all(np.array_equal(value, seen[name]) for name, value in pair.scene.observation.items())


@pytest.fixture(scope="module")
def pair(request: Any) -> Iterator[Pair]:
    suite, index = request.param.split()
    pair = pair_of(suite, int(index))
    yield pair
    pair.official.close()
    pair.scene.close()


@pytest.mark.parametrize(
    "pair", ["libero_spatial 0", "libero_object 0", "libero_goal 0", "libero_10 0", "libero_90 5"], indirect=True
)
@pytest.mark.sim
@pytest.mark.slow
def test_chunks_equal_the_official_ones(pair: Pair) -> None:
    draw = np.random.default_rng(5)
    start(pair, pair.states[3])
    for _ in range(CHUNKS):
        actions = np.clip(draw.uniform(-1, 1, 7) + draw.normal(0, 0.5, (CHUNK, 7)), -1, 1)
        for i, action in enumerate(actions):
            film(pair.official, i == CHUNK - 1)
            show(pair.official)
            seen, reward, done, _ = pair.official.step(action)
            assert pair.scene.step(action) == (reward, bool(done))
        assert_equal(pair, seen)
        for name, image in pair.scene.images().items():
            assert np.array_equal(image, seen[FILMED[name]][::-1, ::-1]), name


@pytest.mark.parametrize("pair", ["libero_spatial 0"], indirect=True)
@pytest.mark.sim
@pytest.mark.slow
def test_a_solved_episode_is_equal_and_faster(pair: Pair) -> None:
    from vla_rl.plugins.envs.libero.expert import Expert, find_recipe

    start(pair, pair.states[0])
    expert = Expert(find_recipe("libero_spatial", 0, pair.scene.task.instruction))
    results: list[tuple[float, bool]] = [(0.0, False)]
    ratios = []
    while not results[-1][1] and len(results) < 200:
        plan = []
        begun = time.perf_counter()
        with pair.scene.rehearsal():
            for _ in range(CHUNK):
                plan.append(expert.choose_action(pair.scene.observation))
                pair.scene.step(plan[-1])
        between = time.perf_counter()
        show(pair.official)
        answers = [pair.official.step(action) for action in plan]
        ratios.append((time.perf_counter() - between) / (between - begun))
        results += [pair.scene.step(action) for action in plan]
        assert results[-CHUNK:] == [(reward, bool(done)) for _, reward, done, _ in answers]
        assert_equal(pair, answers[-1][0])
    assert results[-1] == (1.0, True)
    assert np.median(ratios) > 1.15, "the same steps, side by side"

    times = []
    for state in pair.states[1:6]:
        begun = time.process_time()
        pair.scene.place(0, state, 0)
        times.append(time.process_time() - begun)
    assert min(times) < 0.05, "seconds of a reset to a fixed state"


@pytest.mark.parametrize("pair", ["libero_spatial 0"], indirect=True)
@pytest.mark.sim
@pytest.mark.slow
def test_an_episode_depends_on_its_state_alone(pair: Pair) -> None:
    scene, actions = pair.scene, np.random.default_rng(2).uniform(-1, 1, (CHUNK, 7))
    ends = []
    for number in (4, 4, 7, 4):
        scene.place(0, pair.states[number], 3)
        ends.append([scene.step(action) and scene.simulator_state() for action in actions])
        scene.place(number, None, 1)
        if len(ends) == 3:
            scene._start.cache_clear()  # so that the last one is placed, not remembered
            scene._draw.cache_clear()
    assert np.array_equal(ends[0], ends[1]) and np.array_equal(ends[0], ends[3])
    assert not np.array_equal(ends[0], ends[2])


@pytest.mark.sim
def test_torques_are_those_of_robosuites_controller() -> None:
    """In every physics step, also in the first after a reset, where the controller has read the arm before it moved."""
    scene, suite = build("libero_spatial", 0)
    robot, compared = scene._loop._robot_control, []

    def compare_controls() -> None:
        controller, (low, high), is_read = scene._robot.controller, scene._robot.torque_limits, robot.is_read
        write_controls()
        ours = scene._data.ctrl[:7].copy()
        controller.new_update = not is_read
        controller.sim.forward = lambda: None  # the pass is made already, and another would move the solver
        compared.append((is_read, np.array_equal(ours, np.clip(controller.run_controller(), low, high))))

    write_controls, robot.write_controls = robot.write_controls, compare_controls
    scene.place(0, suite.initial_states(0)[2], 0)
    for action in np.random.default_rng(3).uniform(-1, 1, (2, 7)):
        scene.step(action)
    assert compared == [(True, True)] + [(False, True)] * 49
    scene.close()


@pytest.mark.sim
@pytest.mark.slow
def test_fast_physics_differs_by_the_warm_start_alone() -> None:
    exact, suite = build("libero_spatial", 0)
    fast, _ = build("libero_spatial", 0, fast_physics=True)
    actions = np.random.default_rng(1).uniform(-0.3, 0.3, (CHUNK, 7))
    ends = []
    for scene in (exact, fast, fast):
        scene.place(0, suite.initial_states(0)[0], 10)
        for action in actions:
            scene.step(action)
        ends.append(scene.simulator_state())
        positions = slice(1, 1 + scene._model.nq)
    difference = np.abs(ends[1] - ends[0])[positions].max()
    assert difference < 1e-4  # none with a MuJoCo whose forward passes leave the warm start alone
    assert np.array_equal(ends[1], ends[2])
    exact.close()
    fast.close()


@pytest.mark.sim
def test_fast_render_draws_simpler_meshes_and_changes_nothing_else() -> None:
    import mujoco

    from vla_rl.toolkit.envs.meshes import CHANGED, simplify_meshes

    exact, suite = build("libero_spatial", 0)
    fast, _ = build("libero_spatial", 0, fast_render=True)
    seen = []
    for scene in (exact, fast):
        scene.place(0, suite.initial_states(0)[0], 10)
        scene.step(np.array([0.3, 0.1, -0.3, 0, 0, 0, 1]))
        seen.append((scene.simulator_state(), scene.images()))
    assert np.array_equal(seen[0][0], seen[1][0])
    for camera, image in seen[0][1].items():
        apart = np.abs(image.astype(int) - seen[1][1][camera]).max(-1)
        assert 0 < (apart > 16).mean() < 0.08, f"pixels of {camera} that differ"
    model = fast._rendered_model
    whole = {name: getattr(model, name).copy() for name in CHANGED}
    bowl = model.geom("akita_black_bowl_1_g0").dataid[0]
    with simplify_meshes(model, 16):
        assert model.mesh_facenum.sum() < whole["mesh_facenum"].sum() / 2
        assert model.mesh_facenum[bowl] < whole["mesh_facenum"][bowl] / 4
        copied = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
    copied.free()
    assert all(np.array_equal(getattr(model, name), array) for name, array in whole.items())
    exact.close()
    fast.close()


def resident(switches: int, resets: int) -> list[float]:
    """Memory of this process after each task switch and its resets [MiB]: two tasks in turn, one env."""
    config = LiberoConfig(suite="libero_spatial", tasks=(0, 1), cameras={"agentview": SIZE}, settle_steps=1)
    env = plugin.build(config, EnvContext(num_envs=1, chunk=1))
    env_id, by_task = np.array([0]), {}
    for state in env.reset_states("eval"):
        by_task.setdefault(state.task, []).append(state.id)
    used = []
    for switch in range(switches):
        for state in list(by_task.values())[switch % 2][:resets]:
            env.reset(env_id, np.array([state]), env_id)
            env.chunk_step(np.zeros((1, 1, 7)), np.array([True]), False)
        used.append(psutil.Process().memory_info().rss / 2**20)
    env.close()
    return used


@pytest.mark.sim
@pytest.mark.slow
def test_memory_stays() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        used = pool.apply(resident, (5, 4))
    assert used[4] < 1.05 * used[2], used


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda:1", "4,5", "5"),
        ("cuda", "4,5", "4"),
        ("cuda:1", None, "1"),
        ("cuda", None, "0"),
        ("cpu", "4,5", None),
        ("cpu", None, None),
    ],
)
def test_the_card_that_draws(device: str, visible: str | None, expected: str | None) -> None:
    assert egl_device(device, visible) == expected


@pytest.mark.parametrize(("device", "visible"), [("cuda:2", "4,5"), ("cuda:0", ""), ("cuda:0", "GPU-8f1c")])
def test_a_card_that_cannot_be_told(device: str, visible: str) -> None:
    with pytest.raises(UserError, match=f"EGL number of {device} from CUDA_VISIBLE_DEVICES='{visible}'"):
        egl_device(device, visible)
