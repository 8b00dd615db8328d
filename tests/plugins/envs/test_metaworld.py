"""Real Meta-World, mostly reach, drawer-close and push at few pixels with fast rendering, in this process."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.recordings import record, write_lerobot

from vla_rl.core.catalogue import build, load
from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import PluginError, SpecError, UserError
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.requirements import install_command
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import ChunkResult
from vla_rl.plugins.envs.metaworld import plugin
from vla_rl.plugins.envs.metaworld.config import CAMERAS, MetaWorldConfig
from vla_rl.plugins.envs.metaworld.tasks import BENCHMARKS, CORNER2_POSITION, INSTRUCTIONS
from vla_rl.runtime.start import clone, run
from vla_rl.testing import check_env

os.environ.setdefault("MUJOCO_GL", "egl")  # importing Meta-World imports mujoco
pytestmark = pytest.mark.sim
pytest.importorskip("metaworld", reason="needs Meta-World: pip install -e '.[metaworld]'")

SIZE, CHUNK = 48, 4
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (1, 3 * CHUNK, 4)).astype(np.float32)
ONE_ENV, ON = np.array([0]), np.array([True])
SPEC = """
name: metaworld-test
plugins: [vla_rl.testing.scripted]
model: {type: linear}
env: {type: metaworld, num_envs: 2, tasks: [reach-v3, drawer-close-v3], cameras: {corner4: 64, gripperPOV: 32},
      fast_render: true, max_steps: 6, reward: dense}
rollout: {chunk: 4, episodes: 4, group_size: 2}
algorithm: {type: grpo}
runtime: {backend: local}
train: {steps: 1, lr: 1.0e-2, micro_batch: 4}
eval: {episodes_per_task: 1, before: false}
hooks: [{type: jsonl}]
"""


def make(num_envs: int = 1, **changes: Any) -> Any:
    config = {"tasks": ("drawer-close-v3",), "cameras": {"corner4": SIZE}, "fast_render": True} | changes
    return plugin.build(MetaWorldConfig(**config), EnvContext(num_envs=num_envs, chunk=CHUNK))


@pytest.fixture(scope="module")
def env() -> Iterator[Any]:
    env = make(tasks=("drawer-close-v3", "push-v3"), keep_tasks=1, reward="dense")
    yield env
    env.close()


def env_of(env: Any) -> Any:
    return env.inline_env(0)


def state_of(env: Any, task: str, split: str = "train", number: int = 0) -> int:
    return [state.id for state in env.reset_states(split) if state.task == task][number]


def play(env: Any, state_id: int) -> tuple[Any, list[ChunkResult]]:
    start = env.reset(ONE_ENV, np.array([state_id]), ONE_ENV)
    return start, [env.chunk_step(ACTIONS[:, i : i + CHUNK], ON, False) for i in range(0, ACTIONS.shape[1], CHUNK)]


def same(one: tuple[Any, list[ChunkResult]], other: tuple[Any, list[ChunkResult]]) -> bool:
    views = zip((one[0], *(r.obs for r in one[1])), (other[0], *(r.obs for r in other[1])), strict=True)
    images = all(
        np.array_equal(a.images[n], b.images[n]) and np.array_equal(a.state, b.state)
        for a, b in views
        for n in a.images
    )
    rewards = all(np.array_equal(a.rewards, b.rewards) for a, b in zip(one[1], other[1], strict=True))
    return images and rewards


# ------------------------------------------------------------------------------------------------- tables


def test_tasks_benchmarks_and_cameras_are_those_of_the_package() -> None:
    from metaworld import env_dict
    from metaworld.policies import ENV_POLICY_MAP

    assert list(INSTRUCTIONS) == list(env_dict.ALL_V3_ENVIRONMENTS)
    assert {name: tuple(getattr(env_dict, f"{name}_V3")) for name in ("MT10", "MT25", "MT50")} == BENCHMARKS
    assert set(INSTRUCTIONS) == set(ENV_POLICY_MAP)
    assert INSTRUCTIONS["push-back-v3"] == INSTRUCTIONS["push-v3"], "lerobot has 49 sentences for fifty tasks"
    assert len(set(INSTRUCTIONS.values())) == len(INSTRUCTIONS) - 1 == 49
    model = env_dict.ALL_V3_ENVIRONMENTS["push-v3"]().model
    assert set(CAMERAS) == {model.camera(i).name for i in range(model.ncam)}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "tasks: [push-v2]",
            r"tasks: no Meta-World task 'push-v2'; did you mean 'push-v3'\?\n    tasks: assembly-v3, ",
        ),
        ("tasks: [push-v3, push-v3]", "a task is named twice: push-v3, push-v3"),
        ("tasks: []", "give tasks, such as .push-v3., or a benchmark: MT10, MT25, MT50"),
        ("fast_render: true", "env.tasks: required, but missing"),
        (
            "tasks: MT11",
            r"no Meta-World benchmark 'MT11'; did you mean 'MT10'\?; give MT10, MT25, MT50, or \[push-v3, ...\]",
        ),
        ("benchmark: MT10", "env.benchmark: unknown key; now tasks: MT10, or names"),
        (
            "tasks: [push-v3], cameras: {corner5: 84}",
            r"no metaworld camera 'corner5'; did you mean 'corner'\?\n    cameras: corner, ",
        ),
        ("tasks: [push-v3], cameras: {corner2: 0}", "camera 'corner2' has 0 pixels; give 8 to 1024"),
        ("tasks: [push-v3], cameras: {}", "name at least one camera, such as {corner2: 224}"),
        ("tasks: [push-v3], reward: shaped", "expected one of 'sparse', 'dense', got str 'shaped'"),
        ("tasks: [push-v3], max_steps: 0", "'max_steps' must be >= 1"),
    ],
)
def test_bad_settings_are_refused_with_what_exists(keys: str, message: str) -> None:
    text = SPEC.replace(SPEC[SPEC.index("tasks:") : SPEC.index("}\nrollout")], keys)
    with pytest.raises(SpecError, match=message):
        parse_spec(text)


def test_benchmarks_choose_tasks_and_ids_do_not_depend_on_the_choice() -> None:
    ten, one = make(tasks="MT10"), make(tasks=("push-v3",), max_steps=77)
    assert [task.name for task in ten.info.tasks] == list(BENCHMARKS["MT10"])
    assert {task.max_steps for task in ten.info.tasks} == {500}
    assert (one.info.tasks[0].instruction, one.info.tasks[0].max_steps) == ("Push the puck to a goal", 77)
    assert (len(ten.reset_states("train")), len(ten.reset_states("eval"))) == (2000, 500)
    for split in ("train", "eval"):
        of_push = [state for state in ten.reset_states(split) if state.task == "push-v3"]
        assert of_push == list(one.reset_states(split))
    assert (plugin.action_dim(None), one.info.action_dim, one.info.state_dim) == (4, 4, 4)  # type: ignore[misc]


# -------------------------------------------------------------------------------------------- exactness


def test_episodes_and_images_equal_those_of_the_official_environment() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.types import Task

    cameras = dict.fromkeys(CAMERAS, SIZE)
    env = make(tasks=("push-v3",), cameras=cameras, fast_render=False, reward="dense")
    start, results = play(env, state_of(env, "push-v3"))
    scene = env_of(env)._scene
    kind = ALL_V3_ENVIRONMENTS["push-v3"]
    vector = scene._env._last_rand_vec
    data = pickle.dumps({"rand_vec": vector, "env_cls": kind, "partially_observable": False})
    for name, turned in CAMERAS.items():
        official = kind(render_mode="rgb_array", camera_name=name, width=SIZE, height=SIZE)
        official.set_task(Task("push-v3", data))
        if name == "corner2":
            official.model.cam_pos[2] = CORNER2_POSITION
        observation, _ = official.reset()
        assert np.array_equal(start.state[0], observation[:4].astype(np.float32))
        rewards = [official.step(action)[1] for action in ACTIONS[0]]
        assert np.array_equal(np.concatenate([r.rewards[0] for r in results]), np.float32(rewards))
        frame = official.render()
        frame = frame[::-1, ::-1] if turned else frame
        assert np.array_equal(results[-1].obs.images[name][0], frame), name
        axes = official.data.camera(name).xmat.reshape(3, 3)
        up = axes[:, 1] * (-1 if turned else 1)
        assert up[2] > 0.5 or (up[1] > 0.9 and axes[2, 2] > 0.9), (
            f"{name} shows neither up nor, from above, away from the robot on top"
        )
        official.close()
    env.close()


def test_a_scene_is_that_of_lerobots_evaluation() -> None:
    """Made as src/lerobot/envs/metaworld.py makes it; its first image has the goal of the reset before, so one step."""
    import metaworld

    from vla_rl.plugins.envs.metaworld.scene import MetaWorldScene

    mt1 = metaworld.MT1("push-v3", seed=42)
    official = mt1.train_classes["push-v3"](render_mode="rgb_array", camera_name="corner2", width=SIZE, height=SIZE)
    official.set_task(mt1.train_tasks[0])
    official.model.cam_pos[2] = [0.75, 0.075, 0.7]
    official._freeze_rand_vec, official.seeded_rand_vec = False, True
    official.seed(3)
    official.reset(seed=3)
    observation = official.step(ACTIONS[0, 0])[0]
    scene = MetaWorldScene("push-v3", MetaWorldConfig(tasks=("push-v3",), cameras={"corner2": SIZE}))
    scene.place(3)
    scene.step(ACTIONS[0, 0])
    assert np.array_equal(observation[:4].astype(np.float32), scene.state())
    assert np.array_equal(np.flip(official.render(), (0, 1)), scene.images()["corner2"])
    official.close()
    scene.close()


def test_the_place_of_corner2_and_the_settling_are_keys() -> None:
    own = {"cameras": {"corner2": SIZE, "corner4": SIZE}, "corner2_position": (1.3, -0.2, 1.1)}
    public, moved = make(cameras=own["cameras"], settle_steps=2), make(**own)
    state = state_of(public, "drawer-close-v3")
    settled, start = (env.reset(ONE_ENV, np.array([state]), ONE_ENV) for env in (public, moved))
    for _ in range(2):
        env_of(moved)._scene.step(np.zeros(4))
    assert not np.array_equal(settled.state, start.state)
    assert np.array_equal(settled.state[0], env_of(moved)._scene.state())
    images, moved_images = settled.images, env_of(moved)._scene.images()
    assert np.array_equal(images["corner2"], images["corner4"]), "lerobot moves corner2 to the place of corner4"
    assert np.array_equal(images["corner4"][0], moved_images["corner4"])
    assert not np.array_equal(images["corner2"][0], moved_images["corner2"])
    assert not public.info.notes[1:] and "corner2 stands at 1.3 -0.2 1.1" in moved.info.notes[1]
    public.close()
    moved.close()


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_state_gives_the_same_episode_whatever_went_before(env: Any, split: str) -> None:
    """`keep_tasks: 1`, so each change of the task builds it again."""
    push, drawer = state_of(env, "push-v3", split, 7), state_of(env, "drawer-close-v3", split)
    generators = np.random.get_state()[1].copy()  # noqa: NPY002
    first = play(env, push)
    other = play(env, state_of(env, "push-v3", split, 8))
    assert same(play(env, push), first) and not same(other, first)
    play(env, drawer)
    assert list(env_of(env)._scenes) == ["drawer-close-v3"]
    assert same(play(env, push), first)
    now = np.random.get_state()[1]  # noqa: NPY002
    assert np.array_equal(now, generators), "the global generator was drawn from"


def test_splits_share_no_scene(env: Any) -> None:
    drawn = {}
    for split in ("train", "eval"):
        for state in [s for s in env.reset_states(split) if s.task == "push-v3"][:15]:
            env.reset(ONE_ENV, np.array([state.id]), ONE_ENV)
            drawn[state.id] = env_of(env)._scene._env._last_rand_vec
    vectors = np.array(list(drawn.values()))
    apart = np.linalg.norm(vectors[:, None] - vectors[None], axis=-1) + np.eye(len(vectors))
    assert vectors.shape == (30, 6) and apart.min() > 1e-4  # metres


def test_the_expert_solves_train_states_and_leaves_no_trace(env: Any) -> None:
    for task in ("push-v3", "drawer-close-v3"):
        state, chunks, results = state_of(env, task), [], []
        env.reset(ONE_ENV, np.array([state]), ONE_ENV)
        while not results or not (results[-1].terminated.any() or len(results) > 40):
            assert np.array_equal(env.expert_chunk(), env.expert_chunk())
            chunks.append(env.expert_chunk())
            results.append(env.chunk_step(chunks[-1], ON, True))
        steps = int(results[-1].executed.sum())
        assert results[-1].success[0] and np.abs(chunks).max() <= 1
        assert results[-1].terminated[0].tolist() == [i == steps - 1 for i in range(CHUNK)]
        env.reset(ONE_ENV, np.array([state]), ONE_ENV)
        replay = [env.chunk_step(chunk, ON, True) for chunk in chunks]
        assert same((results[0].obs, results), (replay[0].obs, replay)), "looking ahead changed the episode"


# --------------------------------------------------------------------------------------- what is measured


def test_rewards_and_the_step_limit_are_ours() -> None:
    sparse = make(max_steps=3)
    state = state_of(sparse, "drawer-close-v3")
    sparse.reset(ONE_ENV, np.array([state]), ONE_ENV)
    rewards, ends = [], []
    for _ in range(130):  # on past the success and past the 500 steps after which the simulator refuses
        result = sparse.chunk_step(sparse.expert_chunk(), ON, False)
        rewards.append(result.rewards[0])
        ends.append(result.terminated[0])
        assert np.array_equal(result.rewards[0], result.succeeded[0].astype(np.float32))
        assert not result.truncated.any() and result.executed.all()
    sparse.close()
    assert np.concatenate(rewards)[0] == 0 and np.concatenate(rewards).any()
    assert np.array_equal(np.concatenate(rewards) == 1, np.concatenate(ends))
    assert sparse.info.tasks[0].max_steps == 3
    dense = make(reward="dense")
    start, results = play(dense, state)
    dense.close()
    assert start.state.shape == (1, 4)
    assert 0 < np.concatenate([r.rewards[0] for r in results]).max() < 10


def test_fast_render_is_said_in_the_notes_and_changes_pixels_only(env: Any) -> None:
    exact = make(fast_render=False, reward="dense")
    assert not exact.info.notes and "fast_render" in env.info.notes[0]
    state = state_of(exact, "drawer-close-v3")
    (_, slow), (_, fast) = play(exact, state), play(env, state)
    exact.close()
    assert np.array_equal(slow[-1].obs.state, fast[-1].obs.state)
    assert all(np.array_equal(a.rewards, b.rewards) for a, b in zip(slow, fast, strict=True))
    difference = np.abs(slow[-1].obs.images["corner4"].astype(int) - fast[-1].obs.images["corner4"])
    assert 1 < difference.mean() < 30


# ------------------------------------------------------------------------------------------ from a spec


def test_a_spec_gives_an_environment_that_keeps_to_the_contract() -> None:
    """Two envs, each in a separate process."""
    spec = parse_spec(SPEC.replace("max_steps: 6", "max_steps: 500")).env
    load("env", spec.type).preflight(spec.config)  # type: ignore[misc]
    check_env(build("env", spec.type, spec.config, EnvContext(num_envs=2, chunk=CHUNK)), chunk=CHUNK, seconds=10)


def test_the_specs_of_the_page_are_right() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulators" / "metaworld.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("env: {")]
    for line in lines:
        text = SPEC[: SPEC.index("env:")] + line + SPEC[SPEC.index("\nrollout") :]
        assert parse_spec(text, overrides=["env.num_envs=2"]).env.type == "metaworld"
    assert len(lines) == 2


def test_a_training_step(tmp_path: Path) -> None:
    results = run(parse_spec(SPEC), tmp_path / "run", resume=False)
    assert results["steps"] == 1 and set(results["tasks"]) == {"reach-v3", "drawer-close-v3"}
    assert any("fast_render" in note for note in results["notes"])
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["rollout/env_steps"] == 24 and line["update/samples"] == 8 and line["policy/grad_norm"] > 0
    assert 0 < line["env/return"] < 60


def test_a_data_set_like_lerobots_is_cloned(tmp_path: Path) -> None:
    """The data set's feature names, and a sentence that two tasks share; the spec is the page's."""
    env = make(tasks=("push-v3", "push-back-v3"), cameras={"corner2": SIZE}, num_envs=1)
    states = [state_of(env, task) for task in ("push-v3", "push-back-v3")]
    write_lerobot(tmp_path / "mt50", record(env, states, 6), 3.0, video=True, feature_of="observation.image")
    env.close()
    page = (Path(__file__).parents[3] / "docs" / "simulators" / "metaworld.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("imitation:"))
    data = line.replace("lerobot/metaworld_mt50", str(tmp_path / "mt50"))
    text = SPEC.replace("corner4: 64, gripperPOV: 32", "corner2: 64").replace("[reach-v3, drawer-close-v3]", "MT50")
    small = ["imitation.steps=1", "imitation.batch=4", "imitation.lr_warmup_steps=0"]
    results = clone(parse_spec(f"{text}{data}\n", overrides=small), tmp_path / "run", resume=False)
    assert results["steps"] == 1


def test_a_machine_without_drawing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_rl.toolkit.envs import rendering as machine

    monkeypatch.setattr(machine, "probe_once", lambda name: machine.ProbeResult(False, "libEGL knows no device"))
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(
        UserError, match="metaworld draws with egl, which does not work on this machine: libEGL knows no device"
    ):
        load("env", "metaworld").preflight(None)  # type: ignore[misc]
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    load("env", "metaworld").preflight(None)  # type: ignore[misc]


def test_a_missing_package_is_named_before_any_env_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_rl.plugins.envs.metaworld import single_env

    monkeypatch.setattr(single_env, "find_spec", lambda name: None)
    command = re.escape(install_command(OWN_DIST, "metaworld"))
    with pytest.raises(PluginError, match=f"needs 'metaworld', which is not installed; try: {command}"):
        build("env", "metaworld", MetaWorldConfig(tasks=("push-v3",)), EnvContext())


def test_mujoco_imported_too_early_is_an_error_and_no_crash(bare_fork_server) -> None:
    code = "import mujoco, vla_rl.plugins.envs.metaworld.scene"
    surroundings = {key: value for key, value in os.environ.items() if key != "MUJOCO_GL"}
    done = bare_fork_server.run_python("-c", code, env=surroundings)
    assert done.returncode == 1 and "mujoco was imported before MUJOCO_GL was set" in done.stderr


@pytest.mark.ray
def test_lanes_of_an_env_play_what_envs_of_a_lane_play(tmp_path):
    """Two envs in separate processes, each with a thread of the worker. Dense rewards tell of all that moved."""
    apart = SPEC.replace("{backend: local}", "{backend: ray}")
    lanes = f"{apart}placement: {{type: disaggregated, lanes: envs}}\n"
    found = []
    for name, text in (("together", SPEC), ("lanes", lanes)):
        run(parse_spec(text), tmp_path / name, resume=False)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found.append([{k: v for k, v in line.items() if k.startswith(("env/", "rollout/", "eval/"))} for line in lines])
    assert found[0] == found[1] and found[0][0]["env/return"] > 0 and found[0][1]["eval/episodes"] == 2
