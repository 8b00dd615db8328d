"""RoboTwin's seeds, settings and errors, against the recorded double in robotwin_double/."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from robotwin_double import layout
from robotwin_double.cases import APIS, FIRST, TASK, make, reset, settings, shows, write

from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import make_component
from vla_rl.plugins.envs.robotwin import plugin
from vla_rl.plugins.envs.robotwin.config import RobotwinConfig, Seeds
from vla_rl.plugins.envs.robotwin.seeds import SeedBook
from vla_rl.toolkit.envs.settings import Processes

pytest_plugins = ["robotwin_double.fixtures"]


# -------------------------------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize("api", APIS)
def test_seeds_of_the_ranges(api: str, build_robotwin: Any) -> None:
    env = build_robotwin(api)
    assert shows(reset(env, FIRST["eval"]), 100_000) and shows(reset(env, FIRST["eval"] + 1), 100_010)
    assert shows(reset(env, FIRST["train"]), 200_000)


@pytest.mark.parametrize("api", APIS)
def test_seeds_that_do_not_work_are_replaced(api: str, build_robotwin: Any, tmp_path: Path) -> None:
    """The replacement comes from seeds set apart for the state, and never is one that another state has."""
    # things fall over; the expert has no plan; the expert raises; fine; two of the seeds set apart for the first
    seeds = [23, 24, 26, 27, 200_000, 200_001]
    env = build_robotwin(
        api, seeds=Seeds(train=write(tmp_path, "train.json", seeds), eval_states=2, tries=5, check=True)
    )
    first = FIRST["train"]
    assert len(env.reset_states("train")) == 6
    assert env.info.notes[3] == "train seeds from train.json"
    assert shows(reset(env, first), 200_002)
    assert shows(reset(env, first + 1), 200_005) and shows(reset(env, first + 2), 200_010)
    assert shows(reset(env, first + 3), 27) and shows(reset(env, first + 4), 200_000)
    assert shows(reset(env, first), 200_002)


def test_seeds_of_a_file_are_not_checked_with_the_vector_api(build_robotwin: Any, tmp_path: Path) -> None:
    """The file says that its seeds work. A seed whose objects fall over is not replaced by the next seed, which may
    belong to another state."""
    file = write(tmp_path, "train.json", [24, 23, 25])
    env = build_robotwin("vector", seeds=Seeds(train=file, eval_states=1))
    assert shows(reset(env, FIRST["train"]), 24), "the expert was asked"
    assert shows(reset(env, FIRST["train"] + 1), 200_010)
    assert env._venvs[TASK].envs[0].task.ep_num == 200_010


@pytest.mark.parametrize("api", APIS)
def test_too_many_bad_seeds(api: str, build_robotwin: Any) -> None:
    env = build_robotwin(api, seeds=Seeds(tries=2, train_states=251, eval_states=1))
    reset(env, FIRST["train"])
    message = (
        r"none of the seeds 200500, 200501 of RoboTwin task beat_block_hammer can be used \(things do not come to rest, .*"
        r"train state \d+ has no scene\n  give a file of seeds that work \(seeds.train\), or more tries \(seeds.tries\)"
    )
    with pytest.raises(UserError, match=message):
        reset(env, FIRST["train"] + 250)


def test_no_two_states_share_a_seed(tmp_path: Path) -> None:
    train = write(tmp_path, "train.json", [100_001, *range(200_003, 200_030)])
    book = SeedBook(Seeds(train=train, eval_states=30), (TASK,))
    states = [*book.list_states("train"), *book.list_states("eval")]
    assert len({state.id for state in states}) == len(states) == 58
    seeds = [seed for state in states for seed in book.list_candidates(state.id)]
    assert len(set(seeds)) == len(seeds)
    assert {book.find_split(state.id) for state in book.list_states("eval")} == {"eval"}
    assert book.list_candidates(FIRST["eval"]) == (100_000, *range(100_002, 100_010))
    assert book.list_candidates(FIRST["train"]) == (100_001, 200_000, 200_001, 200_002)


@pytest.mark.parametrize(
    ("train", "evaluation", "message"),
    [
        (
            [1, 2, 3],
            [3, 4, 2],
            r"2 seeds of beat_block_hammer are in both seeds.train and seeds.eval: 2, 3; training must",
        ),
        ([1, 1], [2], r"train.json: beat_block_hammer has seeds twice: 1"),
        ([], [2], r"beat_block_hammer needs `success_seeds`, a list of integers"),
        ([True], [2], r"beat_block_hammer needs `success_seeds`, a list of integers"),
        ([2**32], [2], r"beat_block_hammer needs `success_seeds`, a list of integers from 0 to 2\^32 - 1"),
        (
            list(range(10_001)),
            [10**6],
            r"10001 train states of beat_block_hammer times seeds.tries: 10 is more than .* 10000 states",
        ),
    ],
)
def test_files_of_seeds_that_are_refused(
    train: Any, evaluation: Any, message: str, robotwin: Any, tmp_path: Path
) -> None:
    seeds = Seeds(train=write(tmp_path, "train.json", train), eval=write(tmp_path, "eval.json", evaluation))
    config = settings("wheel", robotwin, seeds=seeds)
    with pytest.raises(UserError, match=message):
        make(config)
    with pytest.raises(UserError, match=message):
        plugin.preflight(RobotwinConfig(**config))


def test_files_without_seeds_are_refused(tmp_path: Path) -> None:
    def book(**changes: Any) -> SeedBook:
        return SeedBook(Seeds(**changes), ("place_shoe",))

    file = write(tmp_path, "train.json", [1])
    with pytest.raises(UserError, match=r"train.json has no seeds of task 'place_shoe'\n  it has: beat_block_hammer"):
        book(train=file)
    with pytest.raises(UserError, match=r"absent.json does not exist"):
        book(eval=tmp_path / "absent.json")
    file.write_text("{")
    with pytest.raises(UserError, match=r"train.json: it is not JSON"):
        book(train=file)
    with pytest.raises(UserError, match=r"has 2 seeds of beat_block_hammer; seeds.train_states asks for 3"):
        SeedBook(Seeds(train=write(tmp_path, "train.json", [1, 2]), train_states=3), (TASK,))


# ----------------------------------------------------------------------------------------------- settings and errors


def test_errors_of_a_spec() -> None:
    near = r"no RoboTwin task 'beat_block_hamer'; did you mean 'beat_block_hammer'\?; tasks: adjust_bottle, "
    with pytest.raises(ValueError, match=near):
        RobotwinConfig(tasks="beat_block_hamer")
    with pytest.raises(
        ValueError,
        match=r"no robotwin camera 'left_wrst'; did you mean 'left_wrist'\?; cameras: head, left_wrist, right_wrist",
    ):
        RobotwinConfig(tasks=TASK, cameras=("head", "left_wrst"))
    with pytest.raises(ValueError, match="camera 'head' is named twice"):
        RobotwinConfig(tasks=TASK, cameras=("head", "head"))
    with pytest.raises(ValueError, match="named twice: beat_block_hammer"):
        RobotwinConfig(tasks=(TASK, TASK))
    with pytest.raises(ValueError, match="name at least one task"):
        RobotwinConfig(tasks=())
    with pytest.raises(ValueError, match="apart: false does not work"):
        RobotwinConfig(tasks=TASK, processes=Processes(apart=False))
    with pytest.raises(ValueError, match=r"expected one of 'auto', 'vector', 'classic'.*did you mean 'vector'"):
        make_component("env", "robotwin", tasks=TASK, api="vectr")


def test_a_spec_reads_paths_from_where_it_is_read() -> None:
    env = make_component("env", "robotwin", tasks=[TASK], assets="here", task_config="my.yml",
                    seeds={"train": "train.json", "tries": 3})  # fmt: skip
    config = env.config
    assert (config.tasks, config.assets, config.task_config) == (
        (TASK,),
        Path.cwd() / "here",
        str(Path.cwd() / "my.yml"),
    )
    assert (config.seeds.train, config.seeds.tries) == (Path.cwd() / "train.json", 3)
    assert make_component("env", "robotwin", tasks=TASK, task_config={"camera": {}}).config.task_config == {
        "camera": {}
    }


def test_assets_that_are_missing(robotwin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = robotwin("wheel")
    config = RobotwinConfig(tasks=TASK)
    with pytest.raises(
        UserError, match=r"assets are not there:\n  neither `assets` nor ROBOTWIN_ASSETS_ROOT nor ASSETS_PATH"
    ):
        plugin.preflight(config)
    monkeypatch.setenv("ASSETS_PATH", str(tmp_path))
    message = (
        rf"{tmp_path} \(ASSETS_PATH\) lacks assets/background_texture, .*\n  download them .*robotwin-download-assets"
    )
    with pytest.raises(UserError, match=message):
        plugin.preflight(config)
    monkeypatch.setenv("ROBOTWIN_ASSETS_ROOT", str(found["assets"]))
    plugin.preflight(config)
    make({"tasks": TASK}).close()
    with pytest.raises(UserError, match=r"\(assets\) lacks"):
        plugin.preflight(RobotwinConfig(tasks=TASK, assets=tmp_path))
    with pytest.raises(UserError, match=r"task_config: there is no file .*absent.yml"):
        plugin.preflight(RobotwinConfig(tasks=TASK, task_config="absent.yml"))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("wheel", {"api": "classic"}, r"api: classic is not offered by this RoboTwin, which has vector"),
        ("main", {"api": "vector"}, r"api: vector is not offered by this RoboTwin, which has classic"),
        ("main", {"planner": "mplib"}, r"planner: mplib has no effect with the classic API"),
        ("main", {"assets": "/elsewhere"}, r"assets: /elsewhere has no effect with the classic API, which reads"),
        ("wheel", {"processes": Processes(apart=True, recycle_mib=1)}, r"recycle_mib have no effect with RoboTwin's vector"),
        ("wheel", {"task_config": "demo_cleen"}, r"(?s)task_config: .*demo_cleen.*give demo_clean, demo_randomized, a .yml"),
        ("main", {"task_config": "demo_cleen"}, r"(?s)task_config: no demo_cleen.yml in .*env_cfg.*give demo_clean, "),
        ("wheel", {"task_config": {"camera": {"head_camera_type": "D453"}}}, r"no camera type 'D453'; did you mean 'D435'"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_installation(kind: str, changes: Any, message: str, robotwin: Any) -> None:
    with pytest.raises(UserError, match=message):
        make(settings(kind, robotwin, **changes))


def test_no_robotwin(tmp_path: Path) -> None:
    message = r"there is no RoboTwin {}\n  `pip install rlinf-robotwin-runtime==0.1.3` in a separate interpreter"
    with pytest.raises(UserError, match=message.format("for .*python")):
        make({"tasks": TASK})
    with pytest.raises(UserError, match=message.format(f"in {tmp_path}")):
        make({"tasks": TASK, "checkout": tmp_path})


@pytest.mark.parametrize("kind", ["wheel", "main"])
def test_objects_of_a_task_that_are_missing(kind: Any, robotwin: Any, tmp_path: Path) -> None:
    """RoboTwin prints their names and continues without them, to an AttributeError."""
    config = settings(kind, robotwin)
    with next((tmp_path / kind).rglob(f"{TASK}.py")).open("a") as task:
        task.write('\nHAMMER = {"modelname": "020_hammer", "model_id": 0}\n')
    objects = config.get("assets", tmp_path / kind) / "assets" / "objects"
    with pytest.raises(
        UserError, match=rf"task {TASK} needs objects that are not in {objects}: 020_hammer\n  download"
    ):
        make(config)
    (objects / "020_hammer").mkdir()
    make(config).close()


@pytest.mark.parametrize(("kind", "method"), [("wheel", "gen_sparse_reward_data"), ("main", "take_action")])
def test_a_robotwin_of_another_version(kind: Any, method: str, robotwin: Any, tmp_path: Path) -> None:
    config = settings(kind, robotwin)
    root = tmp_path / kind
    base = next(root.rglob("_base_task.py"))
    base.write_text(
        base.read_text().replace(f"def {method}(", "def step_with(").replace("import Base_Task as", "import A as")
    )
    named = "runtime wheel of unknown version" if kind == "wheel" else rf"{root}, commit unknown"
    with pytest.raises(
        UserError, match=rf"this RoboTwin \({named}\) is of a version .* has no .*{method}\n  known: the "
    ):
        make(config)
    if kind == "main":
        git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "another"]):
            subprocess.run([*git, *command], check=True)
        with pytest.raises(UserError, match=rf"\({root}, commit [0-9a-f]{{7,}}\)"):
            make(config)


def test_a_file_of_settings(build_robotwin: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yml"
    file.write_text(json.dumps(layout.DEMO_CLEAN | {"camera": {"head_camera_type": "Large_D435"}}))
    assert build_robotwin("vector", task_config=str(file)).info.cameras["head"] == (480, 640)
    file.write_text("[]")
    with pytest.raises(UserError, match=r"mine.yml holds no mapping"):
        build_robotwin("classic", task_config=str(file))


def test_specs_of_the_page_are_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulators" / "robotwin.md").read_text()
    on_cpu, official = (yaml.safe_load(text)["env"] for text in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL))
    settings = [{k: v for k, v in env.items() if k not in ("type", "python", "num_envs")} for env in (on_cpu, official)]
    config = make_component("env", "robotwin", **settings[0]).config
    assert config.render == "raster" and config.cameras == ("head",)
    config = make_component("env", "robotwin", **settings[1]).config
    assert config.assets == Path("~/robotwin-assets").expanduser() and config.render == "ray"
    assert config.seeds.eval == Path.cwd() / "eval_seeds.json"
