"""LIBERO-Plus in the simulator, with a small double of its task files: one scene of libero_spatial at 64 pixels."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from libero_plus_wheel import ADDED_REGION, LIT, YEAST, write_descriptions, write_task
from PIL import Image

import libero_plus_assets
from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.envs.libero import compiled, plugin
from vla_rl.plugins.envs.libero import plus_files as files
from vla_rl.plugins.envs.libero.config import LiberoConfig
from vla_rl.plugins.envs.libero.plus import PlusConfig
from vla_rl.plugins.envs.libero.plus.noise import add_noise
from vla_rl.plugins.envs.libero.plus.variants import Variant, all_variants
from vla_rl.plugins.envs.libero.single_env import LiberoEnv
from vla_rl.plugins.envs.libero.suites import Suite
from vla_rl.toolkit.envs.settings import SharedProcesses

pytestmark = pytest.mark.sim
pytest.importorskip("libero", reason="needs LIBERO: pip install -e '.[libero]'")

BASE = "pick_up_the_black_bowl_from_table_center_and_place_it_on_the_plate"
INDEX, SIZE, CHUNK = 2, 64, 4
OWN = 2000
"""LIBERO's first official state of the task."""
CAMERA, NOISE = "_view_45_15_100_0_0_initstate_0", "_view_0_0_100_0_0_initstate_0_noise_50"
ONE, FIRST = np.array([0]), np.array([True, False])
ROBOT = """

class MountedPanda{number}(MountedPanda):
    @property
    def init_qpos(self):
        return np.array([{angles},
  0.8])
"""


def angles_of(number: int) -> list[float]:
    """Return joint angles that tell which robot it is."""
    return [round(0.1 + 0.0002 * number, 6), -0.06, 0.11, -2.34, 0.12, 2.12, 0.8]


@pytest.fixture(scope="module")
def task_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel's folders with what these tests need. Importing it fails, as it must not be imported."""
    import torch

    root = tmp_path_factory.mktemp("packages")
    folder = root / "liberoplus" / "liberoplus"
    tasks, states, robots = folder / "bddl_files/libero_spatial", folder / "init_files", folder / "envs/robots"
    for path in (tasks, states / "libero_newobj/libero_spatial", robots):
        path.mkdir(parents=True)
    (root / "liberoplus/__init__.py").write_text("raise RuntimeError('imported')\n")
    suite = Suite("libero_spatial")
    text = Path(suite.tasks[INDEX].bddl_file).read_text()
    words = "(:language Lift the Dark bowl"
    start = text.index("(:language")
    (tasks / f"{BASE}_language_1.bddl").write_text(text[:start] + words + text[text.index(")", start) :])
    (tasks / f"{BASE}_level1_sample1.bddl").write_text(text)
    state = suite.initial_states(INDEX)[7].copy()
    torch.save(state, states / f"libero_newobj/libero_spatial/{BASE}_level1_sample1.pruned_init")
    classes = [
        ROBOT.format(number=n, angles=", ".join(map(str, angles_of(n)[:-1]))) for n in range(1, files.ROBOTS + 1)
    ]
    (robots / "mounted_panda.py").write_text("class MountedPanda(ManipulatorModel):\n    pass\n" + "".join(classes))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        patch.setattr(files, "files_folder", lambda: folder)
        files._all_joint_angles.cache_clear()
        files.joint_angles.cache_clear()
        yield folder
    files._all_joint_angles.cache_clear()
    files.joint_angles.cache_clear()


PLACE = (0.2, 0.2, 0.94)
"""Where the added object is [m]."""
GREEN = (20, 200, 40)
"""Colour of the table in the test's own assets."""


def with_object(text: str) -> str:
    """Return a task file with one more object."""
    for section, entry in (
        ("(:objects", "bag_of_yeast_1 - bag_of_yeast"),
        ("(:init", "(On bag_of_yeast_1 main_table_add_region)"),
        ("(:regions", ADDED_REGION),
    ):
        text = text.replace(section, f"{section}\n    {entry}", 1)
    return text


def with_pose(state: Array) -> Array:
    """Return a state of the task with the first object's place and velocity before those of its own objects."""
    positions, arm = 9 + 5 * 7 + 4, 9  # arm and fingers; five objects; drawers and knob
    start, speeds = 1 + arm, 1 + positions + arm
    return np.concatenate([state[:start], [*PLACE, 1, 0, 0, 0], state[start:speeds], np.zeros(6), state[speeds:]])


@pytest.fixture(scope="module")
def assets(task_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Assets in the archive's layout: a room with other lights and a green table, and one more object. The wheel says
    which variants have them."""
    import torch
    from libero.libero import get_libero_path

    suite, folder = Suite("libero_spatial"), tmp_path_factory.mktemp("archive")
    write_descriptions(task_files)
    write_task(task_files, suite.name, f"{BASE}_light_1", "LIBERO_Tabletop_Manipulation_light_7")
    added = with_object(Path(suite.tasks[INDEX].bddl_file).read_text())
    (task_files / f"bddl_files/libero_spatial/{BASE}_add_10.bddl").write_text(added)
    state = with_pose(suite.initial_states(INDEX)[0])
    torch.save(state, task_files / f"init_files/libero_newobj/libero_spatial/{BASE}_add_10.pruned_init")
    variants = [variant("_light_1"), variant("_add_10")]
    libero_plus_assets.write_assets(folder, variants, Path(get_libero_path("assets")))
    Image.new("RGB", (8, 8), GREEN).save(folder / "textures/green.png")
    room = ET.parse(folder / LIT)
    table = room.find("./asset/texture[@name='tex-table']")
    assert table is not None
    table.set("file", "../../textures/green.png")
    room.write(folder / LIT)
    return folder


@pytest.fixture(scope="module")
def env_with_assets(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An env whose compiled scenes, which no other test can use, are not kept with those of the user."""
    cache = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "usual_folder", lambda: cache)
        env = make(1, dimensions=("light", "layout"), assets=assets)
        yield env
        env.close()


def make(num_envs: int = 1, **plus: Any) -> Any:
    config = LiberoConfig(
        plus=PlusConfig(suites=("libero_spatial",), **plus),
        cameras={"agentview": SIZE, "wrist": SIZE},
        train_states="official",
        processes=SharedProcesses(apart=False),
    )
    return plugin.build(config, EnvContext(num_envs=num_envs, chunk=CHUNK))


@pytest.fixture(scope="module")
def env(task_files: Path) -> Iterator[Any]:
    """Two envs that share their scenes. The train states are LIBERO's official ones."""
    env = make(2, dimensions=("camera", "robot", "noise", "layout"))
    yield env
    env.close()


def variant(ending: str) -> Variant:
    (match,) = (v for v in all_variants() if v.suite == "libero_spatial" and v.name == BASE + ending)
    return match


def start(env: Any, state_id: int) -> Any:
    return env.reset(ONE, np.array([state_id]), ONE)


def scene_of(env: Any) -> Any:
    return env.inline_env(0)._current_scene


def joints(env: Any) -> Array:
    return np.asarray(scene_of(env).simulator_state()[1:8])


def test_a_variant_changes_one_thing_and_the_next_episode_nothing(env: Any) -> None:
    """Camera, noise and layout; then LIBERO's own episode, which is as it was before."""
    own = start(env, OWN)
    own_state = scene_of(env).simulator_state()
    camera = start(env, variant(CAMERA).state_id)
    assert np.array_equal(scene_of(env).simulator_state(), own_state)
    assert abs(camera.images["agentview"].astype(int) - own.images["agentview"]).mean() > 15
    assert np.array_equal(camera.images["wrist"], own.images["wrist"])
    noise = start(env, variant(NOISE).state_id)
    assert np.array_equal(scene_of(env).simulator_state(), own_state)
    assert np.array_equal(noise.images["wrist"], own.images["wrist"])
    assert not np.array_equal(noise.images["agentview"], own.images["agentview"])
    assert np.array_equal(noise.images["agentview"], start(env, variant(NOISE).state_id).images["agentview"])
    later = env.chunk_step(np.zeros((2, CHUNK, 7), np.float32), FIRST, False).obs.images["agentview"][0]
    assert not np.array_equal(later, noise.images["agentview"][0]), "each image has its own noise"
    again = start(env, OWN)
    assert np.array_equal(again.images["agentview"], own.images["agentview"])
    assert np.array_equal(scene_of(env).simulator_state(), own_state)
    assert len(env.inline_env(0)._scenes._built) == 1, "all of them use one scene"


def test_a_layout_has_its_own_scene(env: Any) -> None:
    own = start(env, OWN)
    layout = start(env, variant("_level1_sample1").state_id)
    assert len(env.inline_env(0)._scenes._built) == 2
    assert layout.instructions == own.instructions and not np.array_equal(layout.images["wrist"], own.images["wrist"])


def test_noise_is_added_to_the_image_as_it_was_drawn(env: Any) -> None:
    blurred = variant("_view_0_0_100_0_0_initstate_0_noise_20")  # the Gaussian, which draws no random numbers
    image = start(env, blurred.state_id).images["agentview"][0]
    drawn = scene_of(env).images()["agentview"]
    expected = add_noise(drawn[::-1, ::-1], 20, np.random.RandomState(0))[::-1, ::-1]
    assert np.array_equal(image, expected)


def test_robots_start_as_the_protocol_says(env: Any) -> None:
    """Official: LIBERO's state overwrites the joints, and only the rest posture is another. Perturbed: they stay."""
    number = next(v.robot for v in all_variants() if v.dimension == "robot" and v.base == BASE)
    robot = variant(f"_view_0_0_100_0_0_initstate_{number}")
    start(env, OWN)
    own, rest = joints(env), scene_of(env)._robot.controller.initial_joint.copy()
    start(env, robot.state_id)
    assert np.allclose(scene_of(env)._robot.controller.initial_joint, angles_of(number))
    assert 1e-6 < np.abs(joints(env) - own).max() < 0.3
    start(env, OWN)
    assert np.array_equal(joints(env), own) and np.array_equal(scene_of(env)._robot.controller.initial_joint, rest)
    instance = env.inline_env(0)
    plus = evolve(instance._config.plus, robot_states="perturbed")
    perturbed = LiberoEnv(2, instance._scenes, evolve(instance._config, plus=plus))
    perturbed.reset(robot.state_id, 0)
    kept = perturbed._current_scene.simulator_state()[1:8]
    assert np.abs(kept - angles_of(number)).max() < 0.06 < np.abs(own - angles_of(number)).max()


def test_envs_that_take_turns_keep_their_cameras(env: Any) -> None:
    states, stay = np.array([variant(CAMERA).state_id, OWN]), np.zeros((2, CHUNK, 7), np.float32)
    both = env.reset(np.array([0, 1]), states, np.array([0, 1])).images["agentview"]
    after = env.chunk_step(stay, np.array([True, True]), False).obs.images["agentview"]
    for state, first, second in zip(states, both, after, strict=True):
        assert np.array_equal(start(env, int(state)).images["agentview"][0], first)
        assert np.array_equal(env.chunk_step(stay, FIRST, False).obs.images["agentview"][0], second)


def test_tasks_name_instructions_and_categories(task_files: Path) -> None:
    plain = make(dimensions=("camera",), levels=(2,))
    tasks = {task.name: task for task in plain.info.tasks}
    task = tasks[variant(CAMERA).task_name]
    assert task.instruction == "pick up the black bowl from table center and place it on the plate"
    assert task.categories == ("camera", "camera, level 2")
    assert tasks[BASE].categories == () and task.max_steps == 220
    assert {state.task for state in plain.reset_states("train")} == {t.name for t in Suite("libero_spatial").tasks}
    assert len(plain.reset_states("eval")) == len(tasks) - 10
    official = make(dimensions=("camera",), levels=(2,), instructions="official")
    words = official.info.task(variant(CAMERA).task_name).instruction
    assert words == task.instruction + " view 45 15 100 0 0 initstate 0"
    paraphrase = variant("_language_1_view_0_0_100_0_0_initstate_0")
    assert files.find_instruction(paraphrase, "unused", official=True) == "lift the dark bowl"


def test_a_light_variant_has_the_lights_and_textures_of_the_assets(env_with_assets: Any, assets: Path) -> None:
    light = variant("_light_1")
    assert light.state_id in {state.id for state in env_with_assets.reset_states("eval")}
    image = start(env_with_assets, light.state_id).images["agentview"][0]
    scene = scene_of(env_with_assets)
    green = (image[..., 1] > 2 * image[..., 0]) & (image[..., 1] > 2 * image[..., 2])
    assert green.mean() > 0.2, "most of the image is the table"
    written = {element.get("name"): element for element in ET.parse(assets / LIT).iter("light")}
    for name, element in written.items():
        assert np.allclose(
            scene._model.light(name).diffuse, [float(part) for part in element.attrib["diffuse"].split()]
        )
    for name in written:
        scene._rendered_model.light(name).diffuse = 0.8  # as LIBERO has them
    assert abs(scene.images()["agentview"].astype(int) - image).mean() > 10, "the image is lit by these lights"
    official = Suite("libero_spatial").initial_states(INDEX)[0]
    settled = scene.simulator_state()
    assert settled.shape == official.shape and np.abs(settled - official)[1:49].max() < 0.1


def test_a_layout_with_an_added_object_starts_in_its_own_state(env_with_assets: Any) -> None:
    start(env_with_assets, variant("_add_10").state_id)
    scene = scene_of(env_with_assets)
    position = scene.observation["bag_of_yeast_1_pos"]
    assert np.abs(position[:2] - PLACE[:2]).max() < 0.01 and 0.9 < position[2] <= PLACE[2]
    assert scene.simulator_state().shape == (92 + 13,)
    shown = scene._model.geom_bodyid[scene._model.geom_group == 1]
    assert scene._env.obj_body_id["bag_of_yeast_1"] in shown, "its mesh is drawn"


def test_a_file_that_is_missing_at_a_reset_is_named(env_with_assets: Any, assets: Path) -> None:
    (assets / YEAST).unlink()
    with pytest.raises(UserError, match=r"ibvtik.xml is missing, which variant libero_spatial/pick_up"):
        start(env_with_assets, variant("_add_10").state_id)
