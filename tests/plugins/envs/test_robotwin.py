"""RoboTwin against the recorded double in robotwin_double/: its two APIs without SAPIEN, CUDA or assets. Nothing here runs
the real simulator."""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from robotwin_double import layout
from robotwin_double.cases import APIS, CHUNK, FIRST, HOME, TASK, goal, reset, scene, settings, shows, step, write
from robotwin_double.interview import FILE as ANSWERS
from robotwin_double.interview import interview

from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.robotwin import patches, plugin, vector
from vla_rl.plugins.envs.robotwin.config import RobotwinConfig, Seeds
from vla_rl.plugins.envs.robotwin.installation import find_installation
from vla_rl.plugins.envs.robotwin.tasks import STEP_LIMITS
from vla_rl.testing import check_env
from vla_rl.toolkit.envs.settings import Processes

pytest_plugins = ["robotwin_double.fixtures"]


# ------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("kind", ["wheel", "RLinf_support", "main", "stable_2.0"])
def test_the_contract_of_a_simulator(kind: str, robotwin: Any) -> None:
    many = {"tasks": (TASK, "place_empty_cup"), "seeds": Seeds(train_states=2, eval_states=2)}
    check_env(plugin, RobotwinConfig(**settings(kind, robotwin, **many)), seconds=4)


@pytest.mark.parametrize("api", APIS)
def test_what_it_offers(api: str, build_robotwin: Any) -> None:
    env = build_robotwin(api, tasks=("place_empty_cup", TASK), cameras=("right_wrist", "head"))
    info = env.info
    assert [(task.name, task.max_steps) for task in info.tasks] == [("place_empty_cup", 500), (TASK, 400)]
    assert all(task.instruction_varies for task in info.tasks)
    assert info.tasks[1].instruction == "there is a hammer, grab it and beat the block"
    assert dict(info.cameras) == {"right_wrist": (240, 320), "head": (240, 320)}
    assert info.action_low == (*[-10.0] * 6, 0.0) * 2 and info.action_high == (*[10.0] * 6, 1.0) * 2
    assert info.chunk_is_one_motion == (api == "vector")
    assert info.state_dim == 14 == plugin.action_dim(RobotwinConfig(tasks=TASK))
    assert info.notes == (
        f"RoboTwin's {api} API, task_config: demo_clean, instructions: seen",
        "images are ray-traced",
        "eval seeds from 100000 on",
        "train seeds from 200000 on",
    )
    assert {split: [state.id for state in env.reset_states(split) if state.task == TASK] for split in FIRST} == {
        "eval": [FIRST["eval"], FIRST["eval"] + 1],
        "train": [FIRST["train"] + i for i in range(4)],
    }


def test_sizes_of_cameras_are_those_of_the_settings(build_robotwin: Any) -> None:
    camera = {"head_camera_type": "L515", "wrist_camera_type": "Large_D435", "collect_head_camera": False}
    env = build_robotwin("vector", task_config=layout.DEMO_RANDOMIZED | {"camera": camera})
    assert dict(env.info.cameras) == {"head": (180, 320), "left_wrist": (480, 640), "right_wrist": (480, 640)}
    obs = reset(env, FIRST["train"])
    assert {name: image.shape[1:3] for name, image in obs.images.items()} == dict(env.info.cameras)
    assert env.info.notes[0].startswith("RoboTwin's vector API, task_config: settings of the spec")
    assert env.info.notes[-1] == "backgrounds of training are from RoboTwin's evaluation set too"


# --------------------------------------------------------------------------------- actions, cameras and success


@pytest.mark.parametrize("api", APIS)
def test_order_of_an_action_and_names_of_cameras(api: str, build_robotwin: Any) -> None:
    """Left arm 6, left gripper, right arm 6, right gripper: absolute, and each wrist camera shows its own arm."""
    env = build_robotwin(api)
    before = reset(env, FIRST["train"])
    assert np.array_equal(before.state[0], HOME)
    assert {name: int(image[0, 0, 0, 0]) for name, image in before.images.items()} == {
        "head": 10,
        "left_wrist": 20,
        "right_wrist": 30,
    }
    target = np.linspace(-3, 3, 14).astype(np.float32)
    target[[6, 13]] = 0.25, 0.75
    after = step(env, target, target).obs
    assert np.allclose(after.state[0], target, atol=2e-3)
    assert all(not np.array_equal(before.images[name], after.images[name]) for name in env.info.cameras)
    left = np.where(np.arange(14) < 7, HOME, target)
    moved = step(env, left).obs
    assert np.allclose(moved.state[0], left, atol=2e-3)
    assert not np.array_equal(moved.images["left_wrist"], after.images["left_wrist"])
    assert api == "vector" or np.array_equal(moved.images["right_wrist"], after.images["right_wrist"])


@pytest.mark.parametrize("api", APIS)
def test_success_and_what_follows_it(api: str, build_robotwin: Any) -> None:
    env, seed = build_robotwin(api), 200_000
    reset(env, FIRST["train"])
    # A chunk of the vector API is one motion: only its last target is reached, and success is known at its end.
    chunk, at = ([HOME - 0.5, goal(seed), HOME], 1) if api == "classic" else ([HOME - 0.5, HOME, goal(seed)], 2)
    won = step(env, *chunk, stop=False)
    assert won.executed.all()
    assert won.succeeded[0].tolist() == won.terminated[0].tolist() == [i >= at for i in range(3)]
    assert won.rewards[0].tolist() == [float(i >= at) for i in range(3)]
    assert won.success.tolist() == [True] and not won.truncated.any()
    assert np.abs(won.obs.state[0] - goal(seed)).max() < scene.NEAR, "the motion ends where the task is solved"

    on = step(env, HOME, HOME, stop=False)
    assert on.executed.all() and on.succeeded.all() and on.rewards.tolist() == [[1.0, 1.0]]
    assert np.array_equal(on.obs.state, won.obs.state), "RoboTwin moves no more after success"
    stopping = step(env, HOME, HOME)
    assert stopping.executed.tolist() == stopping.terminated.tolist() == [[True, False]]

    again = reset(env, FIRST["train"])
    assert np.array_equal(again.state[0], HOME)
    lost = step(env, HOME, HOME)
    assert not lost.success.any() and not lost.rewards.any() and lost.executed.all()


def test_a_classic_env_stops_at_the_action_that_solves(build_robotwin: Any) -> None:
    env = build_robotwin("classic")
    reset(env, FIRST["train"])
    won = step(env, HOME, goal(200_000), HOME)
    assert won.executed.tolist() == [[True, True, False]] and won.rewards.tolist() == [[0.0, 1.0, 0.0]]


def test_a_chunk_is_its_actions_one_by_one_with_the_classic_api(build_robotwin: Any) -> None:
    env = build_robotwin("classic")
    targets = np.random.default_rng(0).uniform(-2, 2, (CHUNK, 14))
    reset(env, FIRST["train"] + 1)
    together = step(env, *targets)
    reset(env, FIRST["train"] + 1)
    for target in targets:
        alone = step(env, target)
    assert np.array_equal(together.obs.state, alone.obs.state)
    assert all(np.array_equal(image, alone.obs.images[name]) for name, image in together.obs.images.items())


@pytest.mark.parametrize("api", APIS)
def test_the_step_limit_is_the_business_of_core(api: str, build_robotwin: Any) -> None:
    """RoboTwin would stand still after 400 actions; a spec may allow more."""
    env = build_robotwin(api, chunk=410)
    reset(env, FIRST["train"])
    targets = np.tile(HOME, (410, 1))
    targets[:, 0] = np.linspace(0, 2, 410)
    result = step(env, *targets)
    assert result.executed.all() and not result.truncated.any()
    later = step(env, np.full(14, 0.5))
    assert np.allclose(later.obs.state, 0.5) and not later.truncated.any()


def test_what_the_vector_api_truncates_is_passed_on(build_robotwin: Any) -> None:
    env = build_robotwin("vector")
    reset(env, FIRST["train"])
    env._venvs[TASK].envs[0].task.step_lim = 4
    result = step(env, *[HOME - 0.1] * 4)
    assert result.truncated.tolist() == [[False, False, False, True]] and not result.terminated.any()


@pytest.mark.parametrize("api", APIS)
def test_end_effector_actions(api: str, build_robotwin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pose and a gripper for each arm, action by action: success is known at its action with both APIs."""
    env = build_robotwin(api, control="end_effector", cameras=("head",))
    info = env.info
    config = RobotwinConfig(tasks=TASK, control="end_effector")
    assert len(info.action_low) == len(info.action_high) == plugin.action_dim(config) == 16
    assert not info.chunk_is_one_motion and info.state_dim == 14
    reset(env, FIRST["train"])
    rotation = np.array([2.0, 0, 0, 0])  # is normalised
    here = np.array([0, 0, 0, 0, 0, 0, 0, 1.0, 0, 0, 0, *rotation, 1.0])  # the left one means: no rotation
    stays = step(env, here)
    assert np.allclose(stays.obs.state[0], HOME) and env.faults() == {}
    right_up = here.copy()
    right_up[10], right_up[15] = 0.4, 0.5
    moved = step(env, right_up).obs.state[0]
    assert np.allclose(moved[:9], HOME[:9]) and np.allclose(moved[[9, 13]], [0.4, 0.5])
    for distance in (1.5, 5.0):  # no plan; an error of the planner
        far = right_up.copy()
        far[8] = distance
        assert np.allclose(step(env, far).obs.state[0], moved), "an arm without a plan stays"
    with pytest.raises(Exception, match=r"control: end_effector has no expert"):
        env.expert_chunk()


def test_an_end_effector_action_that_solves_ends_the_chunk(
    build_robotwin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = build_robotwin("vector", control="end_effector")
    reset(env, FIRST["train"])
    task = env._venvs[TASK].envs[0].task
    monkeypatch.setattr(task, "check_success", lambda: task.robot.targets[2] > 0.25)
    chunk = np.zeros((4, 16))
    chunk[:, 2] = 0.2, 0.3, 0.4, 0.5
    won = step(env, *chunk)
    assert won.executed.tolist() == [[True, True, False, False]] and won.rewards.tolist() == [[0, 1, 0, 0]]
    on = step(env, *chunk, stop=False)
    assert on.succeeded.all() and on.executed.all() and np.array_equal(on.obs.state, won.obs.state)


# ----------------------------------------------------------------------------------------------------- language


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("kind", "texts"), [
    ("seen", {0: {"Hit the block with the red hammer."}, 2: {"Hit the block with the blue hammer."}}),
    ("unseen", {0: {"Let the red tool fall on the block."}, 2: {"Let the blue tool fall on the block."}}),
])  # fmt: skip
def test_the_instruction_names_the_things_of_its_scene(api: str, kind: str, texts: Any, build_robotwin: Any) -> None:
    """VectorEnv itself keeps naming those of the scene that it was made with."""
    env = build_robotwin(api, num_envs=2, instruction_type=kind)
    obs = reset(env, FIRST["train"] + 1, FIRST["train"])  # seeds 200010 (a blue hammer) and 200000 (a red one)
    for told, number in zip(obs.instructions, (2, 0), strict=True):
        colour = {0: "red", 2: "blue"}[number]
        sides = {f"Use the {side} arm to swing the {colour} hammer at the block." for side in ("left", "right")}
        assert told in texts[number] | (sides if kind == "seen" else set())
    assert reset(env, FIRST["train"], FIRST["train"] + 1).instructions == obs.instructions[::-1]
    assert step(env, HOME).obs.instructions == obs.instructions[::-1]


@pytest.mark.parametrize("api", APIS)
def test_without_a_choice_the_wordings_are_those_of_task_config(api: str, build_robotwin: Any) -> None:
    settings = layout.DEMO_CLEAN | {"eval_instruction": "unseen"}
    for changes, kind in (({}, "unseen"), ({"instruction_type": "seen"}, "seen")):
        env = build_robotwin(api, task_config=settings, **changes)
        assert env.info.notes[0].endswith(f"instructions: {kind}")
        told = reset(env, FIRST["train"]).instructions[0]
        assert told.startswith("Let the red tool") == (kind == "unseen")
    assert build_robotwin(api).info.notes[0].endswith("instructions: seen")


def test_instructions_vary(build_robotwin: Any) -> None:
    env = build_robotwin("vector", seeds=Seeds(train_states=40, eval_states=1))
    told = {reset(env, FIRST["train"] + i).instructions[0].split()[0] for i in range(40)}
    assert told == {"Hit", "Use"}


def test_without_the_expert_the_classic_api_cannot_name_things(build_robotwin: Any, tmp_path: Path) -> None:
    file = write(tmp_path, "train.json", [23, 24])
    env = build_robotwin("classic", seeds=Seeds(train=file, eval_states=1, check=False))
    assert shows(reset(env, FIRST["train"]), 200_000) and shows(reset(env, FIRST["train"] + 1), 24)
    assert reset(env, FIRST["train"]).instructions == ("there is a hammer, grab it and beat the block",)
    assert "seeds.check: false" in env.info.notes[-1]


# --------------------------------------------------------------------------------------- being a guest in a process


@pytest.mark.parametrize("api", APIS)
def test_nothing_is_printed_and_no_generator_moves(
    api: str, build_robotwin: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    expected = random.Random(7).random(), np.random.RandomState(7).random()
    env = build_robotwin(api, num_envs=2)
    reset(env, FIRST["train"], FIRST["train"] + 1)
    step(env, HOME, HOME)
    env.close()
    if api == "classic":  # what an env does in its process, done here, where it can be heard
        monkeypatch.chdir(tmp_path)
        single = env._process_of[0].make(0)
        single.reset(FIRST["train"], 0)
        single.step(HOME)
        assert Path.cwd() == tmp_path / "main", "RoboTwin names its assets relative to its checkout"
        single.close()
    assert capfd.readouterr().out == ""
    if api == "vector":
        assert (random.random(), np.random.random()) == expected  # noqa: NPY002


def test_words_do_not_follow_a_generator_that_others_use(build_robotwin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = build_robotwin("vector", num_envs=1)
    monkeypatch.setattr(random, "seed", lambda key: None)  # as if another thread drew at once
    assert (
        len({env.reset(np.array([0]), np.array([FIRST["train"]]), np.array([0])).instructions for _ in range(6)}) == 1
    )


@pytest.mark.parametrize("api", APIS)
def test_envs_change_tasks(api: str, build_robotwin: Any) -> None:
    tasks = (TASK, "place_empty_cup")
    env = build_robotwin(api, num_envs=2, tasks=tasks)
    cup = list(STEP_LIMITS).index("place_empty_cup") * 1_000_000
    reset(env, FIRST["eval"], FIRST["eval"])
    obs = env.reset(np.array([1]), np.array([cup]), np.array([0]))
    assert "cup number" in obs.instructions[0]
    both = step(env, HOME - 0.2).obs
    assert ["cup number" in text for text in both.instructions] == [False, True]
    assert np.allclose(both.state[:, :6], -0.2)
    back = reset(env, cup, FIRST["eval"])
    assert ["cup number" in text for text in back.instructions] == [True, False]
    assert np.array_equal(back.state, [HOME, HOME])


def test_an_env_of_the_vector_api_that_breaks(build_robotwin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = build_robotwin("vector", num_envs=2)
    reset(env, FIRST["train"], FIRST["train"] + 1)
    task = env._venvs[TASK].envs[1].task

    def fail(actions: Any) -> None:
        raise RuntimeError("cuda error: out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(task, "gen_sparse_reward_data", fail)
        result = step(env, HOME - 0.3)
    assert result.executed.tolist() == [[True], [False]]
    assert np.allclose(result.obs.state[0, :6], -0.3) and np.array_equal(result.obs.state[1], HOME)
    faults = env.faults()
    assert list(faults) == [1] and "env 1: Traceback" in faults[1][0] and "out of memory" in faults[1][0]
    step(env, HOME)
    assert env.faults() == {1: ["env 1: it has not been reset since it broke"]}
    env.reset(np.array([1]), np.array([FIRST["train"]]), np.array([0]))
    assert step(env, HOME - 0.3).executed.all() and env.faults() == {}


def test_an_env_of_the_vector_api_that_hangs(build_robotwin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = build_robotwin("vector", processes=Processes(apart=True, deadline_s=0.2))
    reset(env, FIRST["train"])
    monkeypatch.setattr(env._venvs[TASK].envs[0].task, "gen_sparse_reward_data", lambda actions: time.sleep(1.0))
    with pytest.raises(
        RuntimeError, match=r"env 0 \(beat_block_hammer\) gave no answer for 0.2 s \(processes.deadline_s\)"
    ):
        step(env, HOME)


@pytest.mark.timeout(60)
def test_what_is_wrong_with_an_installation_is_said_and_not_tried_for_ever(build_robotwin: Any) -> None:
    env = build_robotwin("vector", planner="curobo")
    with pytest.raises(
        UserError, match=r"(?s)RoboTwin cannot set up task beat_block_hammer:.*CuroboPlanner is not imported"
    ):
        reset(env, FIRST["train"])
    with pytest.raises(UserError, match=r"embodiment franka-panda has 7 joints an arm; actions here are for 6"):
        build_robotwin("RLinf_support", task_config=layout.DEMO_CLEAN | {"embodiment": ["franka-panda"]})


def test_mplib_plans_for_two_arms_in_one_articulation(build_robotwin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The expert solves no scene of such a robot where RoboTwin hands mplib the positions of six joints."""
    seeds = Seeds(train_states=1, eval_states=1, check=True)
    assert shows(reset(build_robotwin("vector", seeds=seeds), FIRST["train"]), 200_000)
    for name in [name for name in sys.modules if name.split(".")[0] == "robotwin"]:
        del sys.modules[name]
    monkeypatch.setattr(patches, "plan_with_all_joints", lambda planner: None)
    with pytest.raises(UserError, match=r"none of the seeds 200000, .* can be used"):
        reset(build_robotwin("vector", seeds=seeds), FIRST["train"])


def test_rasterised_images_replace_ray_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    shaders: list[str] = []
    render = ModuleType("sapien.render")
    vars(render)["set_camera_shader_dir"] = shaders.append
    for name in ("samples_per_pixel", "path_depth", "denoiser"):
        vars(render)[f"set_ray_tracing_{name}"] = lambda value: pytest.fail("ray tracing is set up")
    monkeypatch.setitem(sys.modules, "sapien", ModuleType("sapien"))
    monkeypatch.setitem(sys.modules, "sapien.render", render)
    for _ in range(2):  # a second env in the process
        patches.use_rasteriser()
    render.set_camera_shader_dir("rt")
    render.set_camera_shader_dir("minimal")
    render.set_ray_tracing_denoiser("oidn")
    assert shaders == ["default", "minimal"]


def test_bounds_of_joints_are_those_of_the_robot(build_robotwin: Any, tmp_path: Path) -> None:
    folder = layout.make_assets(tmp_path / "others") / "assets" / "embodiments" / "aloha-agilex"
    urdf = folder / "urdf" / "robot.urdf"
    first = urdf.read_text().replace('"-10" upper="10"', '"-1.5" upper="2"', 1)
    urdf.write_text(first.replace('name="fr_joint6" type="revolute"', 'name="fr_joint6" type="continuous"'))
    info = build_robotwin("vector", assets=tmp_path / "others").info
    assert info.action_low == (-1.5, *[-10.0] * 5, 0.0, *[-10.0] * 6, 0.0)
    assert info.action_high == (2.0, *[10.0] * 5, 1.0, *[10.0] * 6, 1.0)
    (folder / "curobo_left_tmp.yml").unlink()
    with pytest.raises(
        UserError, match=r"aloha-agilex has no curobo_left_tmp.yml, which RoboTwin opens whatever plans"
    ):
        build_robotwin("vector", assets=tmp_path / "others")
    urdf.write_text("<robot")
    with pytest.raises(UserError, match=r"the robot's description .*robot.urdf cannot be read"):
        build_robotwin("vector", assets=tmp_path / "others", planner="curobo")


# ---------------------------------------------------------------------------------------------------- the expert


@pytest.mark.parametrize("api", APIS)
def test_the_experts_motion_is_followed_in_chunks(api: str, build_robotwin: Any) -> None:
    """The expert plays a scene by itself, in physics steps; an episode follows its joint targets, 0.1 s apart."""
    env = build_robotwin(api, num_envs=2)
    reset(env, FIRST["train"], FIRST["train"] + 1)
    first = env.expert_chunk()
    assert first.shape == (2, CHUNK, 14) and first.dtype == np.float32
    assert np.array_equal(env.expert_chunk(), first), "asking changes nothing"
    for env_id, seed in enumerate((200_000, 200_010)):
        way = np.arange(1, CHUNK + 1)[:, None] * 25 / scene.EXPERT_STEPS
        assert np.allclose(first[env_id], HOME + way * (goal(seed) - HOME), atol=1e-6)
    actives = np.array([True, False])
    result = env.chunk_step(first, actives, True)
    second = env.expert_chunk()
    assert np.array_equal(second[1], first[1]), "an env that stood still is where it was"
    assert np.allclose(second[0, 0] - first[0, -1], first[0, 1] - first[0, 0], atol=1e-6)
    while not result.success[0]:
        result = env.chunk_step(env.expert_chunk(), actives, True)
    assert np.abs(result.obs.state[0] - goal(200_000)).max() < scene.NEAR


@pytest.mark.parametrize("api", APIS)
def test_an_expert_that_fails_stands_still(api: str, build_robotwin: Any, tmp_path: Path) -> None:
    file = write(tmp_path, "train.json", [24, 26])  # no plan; an error
    env = build_robotwin(api, num_envs=2, seeds=Seeds(train=file, eval_states=1, check=False))
    reset(env, FIRST["train"], FIRST["train"] + 1)
    step(env, HOME - 0.3)
    expected = np.clip(HOME - 0.3, env.info.action_low, env.info.action_high)
    assert np.allclose(env.expert_chunk(), expected) and not step(env, HOME - 0.3).success.any()


def test_a_seed_that_the_expert_has_checked_is_not_solved_again(
    build_robotwin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = build_robotwin("vector", seeds=Seeds(train_states=1, eval_states=1, check=True))
    solved: list[int] = []
    original = vector.solve_scene
    monkeypatch.setattr(vector, "solve_scene", lambda *args: solved.append(args[-1]) or original(*args))
    for _ in range(2):
        reset(env, FIRST["train"])
        env.expert_chunk()
    assert solved == [200_000]


# ------------------------------------------------------------------------------------------------------- the double


def test_the_double_answers_as_the_real_runtime_did(robotwin: Any) -> None:
    """`answers.json` is recorded from the runtime wheel; test_robotwin_runtime.py asks that again, where it is there."""
    answers = interview(find_installation(RobotwinConfig(**settings("wheel", robotwin))), TASK)
    assert answers == json.loads(ANSWERS.read_text())


def test_the_double_refuses_what_robotwin_would_not_take(robotwin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings("main", robotwin)
    sys.path.insert(0, str(config["checkout"]))
    task = getattr(importlib.import_module(f"envs.{TASK}"), TASK)()
    with pytest.raises(AttributeError):
        task.get_obs()
    with pytest.raises(TypeError, match=r"nothing reads \['colour'\]"):
        task.setup_demo(now_ep_num=0, seed=0, colour="red")
    with pytest.raises(AttributeError):
        task.setup_demo(now_ep_num=0, seed=0, render_freq=0)
    arguments = find_installation(RobotwinConfig(**config)).setup_arguments(TASK)
    with pytest.raises(FileNotFoundError, match="assets/objects"):
        task.setup_demo(now_ep_num=0, seed=0, is_test=True, **arguments)
    monkeypatch.chdir(config["checkout"])
    task.setup_demo(now_ep_num=0, seed=0, is_test=True, **arguments)
    for action in (np.zeros(13), np.zeros(14, int), np.zeros((1, 14))):
        with pytest.raises(ValueError, match=r"an action is float \[14\]"):
            task.take_action(action)
    task.take_action(task.goal, action_type="qpos")
    assert task.eval_success and task.take_action_cnt == 1
    task.take_action(HOME)
    assert task.take_action_cnt == 1, "counts no more after success"
    with pytest.raises(Exception, match=r"Objects is unstable in seed\(3\)"):
        task.setup_demo(now_ep_num=0, seed=3, is_test=True, **arguments)
