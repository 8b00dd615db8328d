"""The page of conventions against what our plugins do: each cell of the column vla-rl is measured again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from conventions import (
    DATA,
    DATA_SUBJECTS,
    MODEL_SUBJECTS,
    MODELS,
    PAGE,
    SIMULATORS,
    SOURCE,
    SUBJECTS,
    TEXTS,
    complete_rows,
    count_cells,
    is_installed,
    measure_opened,
    read_rows,
    write_page,
)
from data_conventions import measure_data
from model_conventions import SENTENCE, measure_models
from package_runs import RUNS, compare_run, is_here, list_rows
from read_conventions import (
    AS_IT_IS,
    AS_LIBERO,
    AS_METAWORLD,
    DATA_ROWS,
    LIBERO_STATE,
    MODEL_ROWS,
    NAMED,
    NOT_USED,
    OF_THE_SPEC,
    OURS_ALONE,
    SIMULATOR_ROWS,
)
from simulator_players import PLUGINS
from source_lines import FileReader, SourceLine, find_wrong_lines
from vla_rl.core.capabilities import Offloadable
from vla_rl.core.catalogue import build, load
from vla_rl.core.contexts import EnvContext
from vla_rl.core.spec.spec import make_component
from vla_rl.plugins.envs.gymnasium.config import CameraSettings, GymnasiumConfig
from vla_rl.plugins.envs.robotwin.config import ACTION_DIMS, STATE_DIM, Seeds
from vla_rl.plugins.envs.robotwin.end_effector import BOUNDS, move_to_poses
from vla_rl.plugins.envs.robotwin.tasks import STEP_LIMITS

ROWS = {heading: read_rows(PAGE.read_text("utf-8"), heading) for heading in TEXTS}
OURS = {(row.subject, row.name): row.ours for rows in ROWS.values() for row in rows if row.ours}
READ = SIMULATOR_ROWS + MODEL_ROWS + DATA_ROWS
LINES = [row[4] for row in READ if isinstance(row[4], SourceLine)]
DOUBLES = Path(__file__).parents[1] / "plugins" / "envs"
CAMERA = {"type": "drawn", "width": 48, "height": 32, "fps": 30}
MARKS = {"libero_warp": (pytest.mark.slow, pytest.mark.timeout(1800))}
"""Kernels are compiled for minutes."""
READ_NAMES = ("gym-pusht", "gym-aloha", "Fetch")
PUBLIC = "metaworld in lerobot"
"""What others make of a simulator."""


def test_cells_are_filled_and_come_from_a_run_or_from_a_named_line() -> None:
    assert [row.source for row in chain(*ROWS.values()) if not SOURCE.fullmatch(row.source)] == []
    filled, cells = count_cells(PAGE.read_text("utf-8"))
    assert filled >= 0.95 * cells
    names = {row.name for row in ROWS[SIMULATORS]} - {PUBLIC}
    asked = {(row.subject, row.name) for row in ROWS[SIMULATORS] if row.name != PUBLIC}
    assert len(names) == 11 and asked == {(subject, name) for subject in SUBJECTS for name in names}
    assert {row.subject for row in ROWS[MODELS]} == set(MODEL_SUBJECTS)
    assert {row.subject for row in ROWS[DATA]} == set(DATA_SUBJECTS)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("run: vla-rl", True),
        ("run: mani_skill 3.0.1, sapien 3.0.3", True),
        ("SITE/gym_aloha/env.py:180 of gym-aloha 0.1.5, not run", True),
        ("prismatic/vla/constants.py:27 of openvla-oft 213c5ff8, not run", True),
        ("run and SITE/gym_aloha/env.py of gym-aloha 0.1.5", False),
        ("SITE/gym_aloha/env.py of gym-aloha 0.1.5, not run", False),
        ("SITE/gym_aloha/env.py:180 of gym-aloha 0.1.5", False),
        ("run: gym-aloha", False),
    ],
)
def test_the_two_forms_of_a_source(text: str, good: bool) -> None:
    assert bool(SOURCE.fullmatch(text)) == good


def test_a_wrong_line_is_found(tmp_path: Path) -> None:
    """In a folder of installed packages and in one of checkouts; other versions are not judged."""
    site, checkouts = tmp_path / "site", tmp_path / "checkouts"
    (site / "arm_kit-1.0.dist-info").mkdir(parents=True)
    (site / "arm_kit-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: arm-kit\nVersion: 1.0\n")
    for file in (site / "arm_kit" / "env.py", checkouts / "arms" / "env.py"):
        file.parent.mkdir(parents=True)
        file.write_text("import this\nOPEN = -1\nCLOSED = 1\n")
    reader = FileReader(checkouts, [site])

    def judge(file: str, number: int, holds: str, owner: str) -> tuple[list[str], list[SourceLine]]:
        return find_wrong_lines([SourceLine(file, number, holds, owner)], reader)

    for file, owner in (("SITE/arm_kit/env.py", "arm_kit 1.0"), ("env.py", "arms c8f03f48")):
        assert judge(file, 2, "OPEN = -1", owner) == ([], [])
        (wrong,), unread = judge(file, 3, "OPEN = -1", owner)
        assert wrong == f"{file}:3 of {owner}, not run: no 'OPEN = -1' on this line; it is on 2" and not unread
        (wrong,), _ = judge(file, 9, "OPEN = 1", owner)
        assert wrong.endswith("the file does not hold it")
        (wrong,), _ = judge(file, 1, "", owner)
    assert judge("SITE/arm_kit/env.py", 9, "OPEN", "arm-kit 1.1") == (
        [],
        [SourceLine("SITE/arm_kit/env.py", 9, "OPEN", "arm-kit 1.1")],
    )
    assert len(judge("env.py", 9, "OPEN", "legs c8f03f48")[1]) == 1
    (wrong,), _ = judge("SITE/arm_kit/legs.py", 1, "OPEN", "arm-kit 1.0")
    assert "No such file" in wrong


def test_lines_of_installed_packages_hold_what_was_read() -> None:
    assert len(LINES) > 50 and all(line.holds for line in LINES)
    wrong, _ = find_wrong_lines(LINES, FileReader())
    assert wrong == []


def test_packages_that_were_run_can_be_run_again() -> None:
    """Each row with `run:` is of a package that package_runs.py drives, or of ours alone."""
    runs = {str(row[4]).split()[1] for row in READ if str(row[4]).startswith("run: ") and row[4] != OURS_ALONE}
    assert runs == set(RUNS) and all(list_rows(name) for name in RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_packages_do_what_the_page_says(name: str) -> None:
    """Only where the row's version is installed: most packages need an environment of their own."""
    named = next(source for _, source in list_rows(name).values()).removeprefix("run: ")
    for part in named.split(", "):
        package, wanted = part.split()
        if not is_here(package) or version(package) != wanted:
            pytest.skip(f"{part} is not installed")
    assert compare_run(name) == []


def test_the_page_is_what_the_tool_writes() -> None:
    assert write_page(*ROWS.values()) == PAGE.read_text("utf-8")
    on_page = {row: row.ours for rows in ROWS.values() for row in rows}
    ours = {(row.subject, row.name): row.ours for row in on_page}
    assert [row for row in complete_rows(READ, ours) if row not in on_page] == []


def test_every_cell_of_a_plugin_is_measured_here(measured_models: dict[tuple[str, str], str]) -> None:
    tested = [*PLUGINS, *READ_NAMES, "robotwin", "lerobot_robot", PUBLIC]
    by_hand = ("state order", "executed steps")
    left = [key for key in OURS if key[1] not in tested and key not in measured_models and key[0] not in by_hand]
    assert left == []


@pytest.fixture(scope="module")
def measured_models() -> dict[tuple[str, str], str]:
    pytest.importorskip("cv2", reason="needs opencv-python, which simulators bring")
    pytest.importorskip("datasets", reason="needs the extra: pip install -e '.[data]'")
    return {**measure_models(), **measure_data()}


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


def test_data_sets_are_as_the_page_says() -> None:
    pytest.importorskip("datasets", reason="needs the extra: pip install -e '.[data]'")
    measured = measure_data()
    assert measured == {key: OURS[key] for key in measured}


def test_metaworld_is_what_checkpoints_in_public_saw() -> None:
    rows = {row.subject: row for row in ROWS[SIMULATORS] if row.name == PUBLIC}
    assert set(rows) == {"sentence", "camera", "images"}
    for subject, row in rows.items():
        assert row.ours == AS_METAWORLD and OURS[subject, "metaworld"].startswith(row.original)


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
    others = {"saved state": NOT_USED, "sentence": OF_THE_SPEC, "order of cameras": NAMED}
    assert {subject: text for (subject, _), text in said.items() if text != AS_IT_IS} == others
    gymnasium.register("Numbers-v0", Numbers, max_episode_steps=5)
    try:
        config = GymnasiumConfig(
            id="Numbers-v0",
            instruction="count",
            success="won",
            cameras={name: CameraSettings(source="pixels", size=8) for name in ("main", "another")},
            state="numbers",
        )
        env = build("env", "gymnasium", config, EnvContext(num_envs=1, chunk=2))
        zero, on = np.zeros(1, np.int64), np.array([True])
        start = [np.asarray(env.reset(zero, np.array([state]), zero).state)[0, 2] for state in (3, 4, 3)]
        assert start[0] == start[2] != start[1]
        assert env.reset(zero, np.array([3]), zero).instructions == ("count",)
        result = env.chunk_step(np.array([[[-1.0, 256.0], [2.0, 512.0]]], np.float32), on, True)
        assert list(result.obs.images) == list(env.info.cameras) == ["main", "another"]
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


@pytest.fixture
def robotwin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin on RoboTwin's recorded double, and the double's cases."""
    monkeypatch.syspath_prepend(str(DOUBLES))
    from robotwin_double import cases, layout

    root = layout.lay_out("wheel", tmp_path / "wheel")
    monkeypatch.syspath_prepend(str(root))
    for name in ("ROBOTWIN_ASSETS_ROOT", "ASSETS_PATH"):
        monkeypatch.setenv(name, "")
    assets = layout.make_assets(tmp_path / "data")
    env = cases.make(cases.settings("vector", lambda kind: {"assets": assets}), 1, 1)
    yield SimpleNamespace(env=env, cases=cases)
    env.close()
    for name in [name for name in sys.modules if name.split(".")[0] in ("robotwin", "envs", "description", "open3d")]:
        del sys.modules[name]


def test_robotwin_is_as_the_page_says(robotwin: Any) -> None:
    env, cases = robotwin.env, robotwin.cases
    first = cases.FIRST["train"]
    shown = [cases.reset(env, state) for state in (first, first + 1, first)]
    same = [np.array_equal(shown[0].images["head"], one.images["head"]) for one in shown[1:]]
    levels = {name: int(image[0, 0, 0, 0]) for name, image in shown[0].images.items()}
    as_drawn = levels == {"head": 10, "left_wrist": 20, "right_wrist": 30}
    won = cases.step(env, cases.goal(200_000))
    success = won.succeeded[0].tolist(), won.terminated[0].tolist(), won.rewards[0].tolist()
    (task,) = env.info.tasks
    names = shown[0].instructions[0] != task.instruction and task.instruction_varies
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
    order = {0: "quaternion w x y z, normalised", 3: "quaternion x y z w, normalised"}[int(right.argmax())]
    low, high = BOUNDS[7]
    assert {subject: text for (subject, name), text in OURS.items() if name == "robotwin"} == {
        "gripper": f"{low:g} to {high:g}",
        "rotation": order,
        "images": AS_IT_IS if as_drawn and shown[0].images["head"].shape[1:3] == (240, 320) else "otherwise",
        "camera": AS_IT_IS if as_drawn else "otherwise",
        "order of cameras": ", ".join(shown[0].images),
        "saved state": "the same scene, by its seed" if same == [False, True] else "otherwise",
        "settling": AS_IT_IS if np.allclose(shown[0].state[0], cases.HOME) else "otherwise",
        "success": "terminated, reward 1, success: bool" if success == ([True], [True], [1.0]) else "otherwise",
        "sentence": "as RoboTwin draws it; another one in each scene" if names else "otherwise",
        "action": f"{ACTION_DIMS['joints']} joints, or {ACTION_DIMS['end_effector']} with end_effector",
        "state": f"{STATE_DIM}",
        "seed": f"a state has up to {Seeds().tries} seeds to try",
        "end without success": f"core ends it after {STEP_LIMITS['beat_block_hammer']} actions",
    }


def test_a_robot_is_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A robot of lerobot's interface, whose image shows its three joints, and a device that presses success."""
    monkeypatch.syspath_prepend(str(DOUBLES / "lerobot_double"))
    for port in ("robot", "device"):
        (tmp_path / port).touch()
    settings = {
        "robot": {
            "type": "chain_follower",
            "port": str(tmp_path / "robot"),
            "cameras": {"front": CAMERA, "above": CAMERA},
        },
        "tasks": [SENTENCE],
        "action_bounds": {"shoulder.pos": [-90, 90], "elbow.pos": [-90, 90], "gripper.pos": [0, 100]},
        "max_step": 10,
        "reset": None,
    }
    button = {"type": "chain_stick", "port": str(tmp_path / "device"), "first": 1, "last": 1, "button": "success"}
    by_target = play_robot(settings, [[5, 0, 7], [5, 0, 7], [90, 0, 7]])
    by_step = play_robot({**settings, "control": "step"}, [[5, 0, 7], [5, 0, 0]])
    won = play_robot({**settings, "teleoperator": button}, [[0, 0, 0], [0, 0, 0]])
    info, result = by_target.env.info, by_target.result
    (told,) = result.obs.instructions
    row = np.asarray(result.obs.images["front"][0])[16 + int(0.16 * 15)]
    as_it_is = {
        "camera": info.cameras["front"] == (CAMERA["height"], CAMERA["width"]),
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
        "sentence": "an entry of `tasks`, as it is written" if told == SENTENCE else "otherwise",
        "order of cameras": "that of the robot's settings" if list(info.cameras) == ["front", "above"] else "otherwise",
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
    assert {row.original.partition(";")[0] for row in rows} == {LIBERO_STATE}
    assert OURS["state", "libero"] == f"8: {LIBERO_STATE}"


def test_a_folder_of_lerobot_says_how_many_actions_are_executed(tmp_path: Path) -> None:
    for names, kind in ((("pi0", "pi05"), "pi0, pi05"), (("smolvla",), "smolvla"), (("openvla",), "openvla"), (("openvla_oft",), "openvla_oft")):  # fmt: skip
        for name in names:
            plugin = load("model", name)
            (tmp_path / "config.json").write_text(f'{{"type": "{name}", "n_action_steps": 7, "chunk_size": 50}}')
            default = plugin.default_chunk and plugin.default_chunk(plugin.config(checkpoint=str(tmp_path)))
            text = "rollout.chunk" + (", else n_action_steps" if default == 7 else "")
            assert OURS["executed steps", kind] == text
