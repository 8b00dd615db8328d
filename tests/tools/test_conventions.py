"""The page of conventions against what our plugins do: each cell of the column vla-rl is measured again."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from conventions import (
    MODEL_SUBJECTS,
    MODELS,
    PAGE,
    SIMULATORS,
    SUBJECTS,
    is_installed,
    measure_opened,
    read_rows,
    write_page,
)
from model_conventions import measure_models
from read_conventions import AS_IT_IS, AS_LIBERO, MODEL_ROWS, NOT_USED, SIMULATOR_ROWS
from simulator_players import PLUGINS
from vla_rl.core.capabilities import Offloadable
from vla_rl.core.catalogue import build, load
from vla_rl.core.contexts import EnvContext
from vla_rl.core.spec.spec import make_component
from vla_rl.plugins.envs.gymnasium.config import CameraSettings, GymnasiumConfig
from vla_rl.plugins.envs.robotwin.config import ACTION_DIMS, STATE_DIM, Seeds
from vla_rl.plugins.envs.robotwin.end_effector import BOUNDS, move_to_poses
from vla_rl.plugins.envs.robotwin.tasks import STEP_LIMITS

ROWS = {heading: read_rows(PAGE.read_text("utf-8"), heading) for heading in (SIMULATORS, MODELS)}
OURS = {(row.subject, row.name): row.ours for rows in ROWS.values() for row in rows if row.ours}
SOURCE = re.compile(r"run: \S+ [\d.]+(, \S+ [\d.]+)*|(run and )?[\w/.]+\.py( of \S+ \S+)?")
DOUBLE = Path(__file__).parents[1] / "plugins" / "envs" / "lerobot_double"
CAMERA = {"type": "drawn", "width": 48, "height": 32, "fps": 30}
MARKS = {"libero_warp": (pytest.mark.slow, pytest.mark.timeout(1800))}
"""Kernels are compiled for minutes."""
READ_NAMES = ("gym-pusht", "gym-aloha", "Fetch")


def test_nine_cells_in_ten_are_filled_and_have_a_source() -> None:
    cells = [cell for rows in ROWS.values() for row in rows for cell in (row.original, row.ours)]
    assert len(ROWS[SIMULATORS]) == 11 * len(SUBJECTS)
    assert {row.subject for row in ROWS[MODELS]} == set(MODEL_SUBJECTS)
    assert sum(map(bool, cells)) >= 0.9 * len(cells)
    assert [row.source for rows in ROWS.values() for row in rows if not SOURCE.fullmatch(row.source)] == []


def test_files_of_our_own_exist() -> None:
    sources = {row.source.removeprefix("run and ") for rows in ROWS.values() for row in rows}
    files = {source for source in sources if source.startswith("src/vla_rl/")}
    assert files and [file for file in files if not (PAGE.parents[2] / file).is_file()] == []


def test_the_page_is_what_the_tool_writes() -> None:
    assert write_page(ROWS[SIMULATORS], ROWS[MODELS]) == PAGE.read_text("utf-8")
    on_page = [tuple(row) for rows in ROWS.values() for row in rows]
    read = [row for row in SIMULATOR_ROWS + MODEL_ROWS if row[3]]
    assert [row for row in read if row not in on_page] == []


def test_every_cell_of_a_plugin_is_measured_here() -> None:
    models = measure_models() if find_spec("cv2") else {}
    tested = [*PLUGINS, *READ_NAMES, "robotwin", "lerobot_robot"]
    by_hand = ("state order", "executed steps")
    left = [key for key in OURS if key[1] not in tested and key not in models and key[0] not in by_hand]
    assert left == [] or not models


@pytest.mark.sim
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in PLUGINS])
def test_simulators_are_as_the_page_says(name: str) -> None:
    if not is_installed(name):
        pytest.skip(f"{name} is not installed")
    measured = measure_opened(PLUGINS[name])
    assert measured == {subject: OURS[subject, name] for subject in SUBJECTS}


def test_models_and_servers_are_as_the_page_says() -> None:
    pytest.importorskip("cv2", reason="needs opencv-python, which simulators bring")
    measured = measure_models()
    assert measured == {key: OURS[key] for key in measured}


class Numbers(gymnasium.Env[Any, Any]):
    """An environment whose images, states and infos show what reaches them and what comes back."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space = gymnasium.spaces.Dict(
        pixels=gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8), numbers=gymnasium.spaces.Box(-9, 9, (3,), np.float32)
    )
    action_space = gymnasium.spaces.Box(np.array([-1, 0], np.float32), np.array([2, 512], np.float32))

    def observe(self, action: Any) -> dict[str, Any]:
        pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
        return {"pixels": pixels, "numbers": np.array([*action, self.place], np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.normal()
        return self.observe([0, 0]), {}

    def step(self, action: Any) -> Any:
        return self.observe(action / [1, 512]), 0.5, bool(action[1] == 512), False, {"won": np.float32(action[0] == 2)}


def test_gymnasium_passes_its_environments_on() -> None:
    """Images, actions, states, ends and success unchanged; the seed decides the scene; saved states are not used."""
    said = {(row.subject, row.name): row.ours for row in ROWS[SIMULATORS] if row.name in READ_NAMES}
    assert set(said.values()) == {AS_IT_IS, NOT_USED}
    assert {subject for (subject, _), text in said.items() if text != AS_IT_IS} == {"saved state"}
    gymnasium.register("Numbers-v0", Numbers, max_episode_steps=5)
    try:
        config = GymnasiumConfig(
            id="Numbers-v0",
            instruction="count",
            success="won",
            cameras={"main": CameraSettings(source="pixels", size=8)},
            state="numbers",
        )
        env = build("env", "gymnasium", config, EnvContext(num_envs=1, chunk=2))
        zero, on = np.zeros(1, np.int64), np.array([True])
        start = [np.asarray(env.reset(zero, np.array([state]), zero).state)[0, 2] for state in (3, 4, 3)]
        assert start[0] == start[2] != start[1]
        result = env.chunk_step(np.array([[[-1.0, 256.0], [2.0, 512.0]]], np.float32), on, True)
        assert np.array_equal(result.obs.images["main"][0], np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
        assert np.allclose(result.obs.state[0, :2], [2.0, 1.0])
        assert result.terminated[0].tolist() == result.succeeded[0].tolist() == [False, True]
        assert not result.truncated.any() and result.rewards[0].tolist() == [0.5, 0.5]
        env.reset(zero, np.array([3]), zero)
        ends = [bool(env.chunk_step(np.zeros((1, 1, 2), np.float32), on, True).truncated.any()) for _ in range(5)]
        assert ends == [False] * 4 + [True]
        env.close()
    finally:
        del gymnasium.registry["Numbers-v0"]


def test_robotwin_is_as_the_page_says() -> None:
    sent = []
    robot = SimpleNamespace(left_plan_path=None, right_plan_path=None)
    task = SimpleNamespace(robot=robot, take_action=lambda poses, action_type: sent.append((poses, action_type)))
    action = np.arange(16.0)
    action[11:15] = 0
    move_to_poses(task, action)
    poses, kind = sent[0]
    left, right = poses[3:7], poses[11:15]
    assert (
        kind == "ee"
        and np.isclose(np.linalg.norm(left), 1)
        and np.allclose(left * np.linalg.norm(action[3:7]), action[3:7])
    )
    first = {0: "quaternion w x y z, normalised", 3: "quaternion x y z w, normalised"}[int(right.argmax())]
    low, high = BOUNDS[7]
    assert {subject: text for (subject, name), text in OURS.items() if name == "robotwin"} == {
        "gripper": f"{low:g} to {high:g}",
        "rotation": first,
        "action": f"{ACTION_DIMS['joints']} joints, or {ACTION_DIMS['end_effector']} with end_effector",
        "state": f"{STATE_DIM}",
        "seed": f"a state has up to {Seeds().tries} seeds to try",
        "end without success": f"core ends it after {STEP_LIMITS['beat_block_hammer']} actions",
    }


def test_a_robot_is_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A robot of lerobot's interface, whose image shows its three joints, and a device that presses success."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    for port in ("robot", "device"):
        (tmp_path / port).touch()
    settings = {
        "robot": {"type": "chain_follower", "port": str(tmp_path / "robot"), "cameras": {"front": CAMERA}},
        "tasks": ["lift the cube"],
        "action_bounds": {"shoulder.pos": [-90, 90], "elbow.pos": [-90, 90], "gripper.pos": [0, 100]},
        "max_step": 10,
        "reset": None,
    }
    button = {"type": "chain_stick", "port": str(tmp_path / "device"), "first": 1, "last": 1, "button": "success"}
    by_target = play_robot(settings, [[5, 0, 7], [5, 0, 7], [90, 0, 7]])
    by_step = play_robot({**settings, "control": "step"}, [[5, 0, 7], [5, 0, 0]])
    won = play_robot({**settings, "teleoperator": button}, [[0, 0, 0], [0, 0, 0]])
    info, result = by_target.env.info, by_target.result
    row = np.asarray(result.obs.images["front"][0])[16 + int(0.16 * 15)]
    as_it_is = {
        "images": row.argmax(1).tolist() == [0] * 16 + [0] * 32 and row[0].tolist() == [255, 0, 0],
        "rotation": not any("rot" in name for name in info.action_names),
        "state": info.state_names == info.action_names and by_target.states[-1] == [15, 0, 7],
        "settling": by_target.states[0] == [5, 0, 7],
    }
    bounded = (info.action_low[2], info.action_high[2]) == (0, 100) and by_target.states[1] == [5, 0, 7]
    moves = by_target.states[2] == [15, 0, 7] and by_step.states == [[5, 0, 7], [10, 0, 7]]
    success = won.result.succeeded[0].tolist(), won.result.terminated[0].tolist(), won.result.rewards[0].tolist()
    assert {subject: text for (subject, name), text in OURS.items() if name == "lerobot_robot"} == {
        **{subject: AS_IT_IS if holds else "otherwise" for subject, holds in as_it_is.items()},
        "gripper": "action_bounds of its joint, absolute" if bounded else "otherwise",
        "action": "the same, or changes of them (step); at most max_step an action" if moves else "otherwise",
        "seed": "nothing" if not info.fixed_states else "the scene",
        "saved state": NOT_USED if not isinstance(by_target.env, Offloadable) else "the same episode",
        "end without success": f"core ends it after {info.tasks[0].max_steps} actions",
        "success": "terminated, reward 1, success: bool" if success == ([True], [True], [1.0]) else "otherwise",
    }


def play_robot(settings: dict[str, Any], actions: list[list[float]]) -> SimpleNamespace:
    """Return the env, its states after each action, and the last result."""
    env = build("env", "lerobot_robot", make_component("env", "lerobot_robot", **settings).config, EnvContext(chunk=1))
    zero, states = np.zeros(1, np.int64), []
    try:
        env.reset(zero, zero, zero)
        for action in actions:
            result = env.chunk_step(np.array([[action]], np.float32), np.array([True]), True)
            states.append(np.asarray(result.obs.state[0]).tolist())
    finally:
        env.close()
    return SimpleNamespace(env=env, states=states, result=result)


def test_models_for_libero_read_its_state_in_the_order_that_they_were_trained_on() -> None:
    rows = [row for row in ROWS[MODELS] if row.subject == "state order"]
    assert rows and {row.ours for row in rows} == {AS_LIBERO}
    assert {f"8: {row.original}" for row in rows} == {OURS["state", "libero"]}


def test_a_folder_of_lerobot_says_how_many_actions_are_executed(tmp_path: Path) -> None:
    for names, kind in ((("pi0", "pi05"), "pi0, pi05"), (("smolvla",), "smolvla"), (("openvla",), "openvla"), (("openvla_oft",), "openvla_oft")):  # fmt: skip
        for name in names:
            plugin = load("model", name)
            (tmp_path / "config.json").write_text(f'{{"type": "{name}", "n_action_steps": 7, "chunk_size": 50}}')
            default = plugin.default_chunk and plugin.default_chunk(plugin.config(checkpoint=str(tmp_path)))
            text = "rollout.chunk" + (", else n_action_steps" if default == 7 else "")
            assert OURS["executed steps", kind] == text
