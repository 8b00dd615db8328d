"""LeRobot folders written from the tabletop simulator: read back exactly, and cloned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from vla_rl.core.catalogue import load
from vla_rl.core.contexts import DataContext, EnvContext, ModelContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import EnvInfo
from vla_rl.plugins.data.lerobot import plugin
from vla_rl.plugins.data.lerobot.config import LeRobotConfig
from vla_rl.plugins.data.lerobot.video import Videos
from vla_rl.runtime.start import clone, evaluate
from vla_rl.testing import check_data
from vla_rl.toolkit.data.samples import check_sample

recordings = pytest.importorskip("recordings", reason="needs the extra: pip install -e '.[data]'")
pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

CHUNK, STEPS = 4, 12
LAYOUTS = [(2.0, False), (2.1, False), (2.1, True), (3, False), (3, True)]


@pytest.fixture(scope="module")
def recorded() -> tuple[EnvInfo, list[dict[str, Any]]]:
    tabletop = load("env", "tabletop")
    env = tabletop.build(tabletop.config(), EnvContext(num_envs=1, chunk=1))
    return env.info, recordings.record(env, [state.id for state in env.reset_states("train")[:3]], STEPS)


@pytest.fixture(scope="module")
def folders(recorded: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    home = tmp_path_factory.mktemp("lerobot")
    made = {}
    for version, video in LAYOUTS:
        made[version, video] = home / f"v{version}-{'video' if video else 'image'}"
        recordings.write_lerobot(made[version, video], recorded[1], version, video)
    return made


def opened(folder: Path, info: EnvInfo, **keys: Any) -> Any:
    return plugin.build(LeRobotConfig(folder=folder, **keys), DataContext(env=info, chunk=CHUNK))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_recorded_is_read(layout: Any, recorded: Any, folders: Any) -> None:
    info, episodes = recorded
    check_data(plugin, LeRobotConfig(folder=folders[layout]), env=info, chunk=CHUNK)
    data = opened(folders[layout], info)
    windows = STEPS - CHUNK + 1
    assert data.num_samples() == len(episodes) * windows
    chosen = np.array([2 * windows + 3, 0, windows - 1, windows])
    obs, actions = data.read_samples(chosen)
    for i, sample in enumerate(chosen):
        episode, t = episodes[sample // windows], sample % windows
        assert np.array_equal(actions[i], episode["actions"][t : t + CHUNK])
        assert np.array_equal(obs.state[i], episode["state"][t])
        assert obs.instructions[i] == episode["instruction"]
        for camera in info.cameras:
            difference = obs.images[camera][i].astype(int) - episode["images"][camera][t]
            assert abs(difference).mean() < (4 if layout[1] else 1e-9), (camera, t)
    every = np.concatenate([e["actions"] for e in episodes])
    assert data.data_statistics()["action"]["q99"] == pytest.approx(np.quantile(every, 0.99, axis=0), abs=1e-6)
    for ends in ("drop", "repeat"):
        recordings.check_differences(opened(folders[layout], info, ends=ends), (None, None, 2))
    assert opened(folders[layout], info, episodes=1).num_samples() == windows


def test_a_log_has_no_progress_bars(recorded: Any, folders: Any, tmp_path: Path, capfd: Any) -> None:
    """Conversion of the images, which happens once for a folder."""
    shutil.copytree(next(folder for (_, video), folder in folders.items() if not video), tmp_path / "new")
    opened(tmp_path / "new", recorded[0])
    assert capfd.readouterr() == ("", "")


def test_a_recording_gives_equal_samples_in_each_version(recorded: Any, folders: Any) -> None:
    everything = [opened(folders[layout], recorded[0]) for layout in LAYOUTS if not layout[1]]
    assert len(everything) == 3
    samples = [data.read_samples(np.arange(data.num_samples())) for data in everything]
    for obs, actions in samples[1:]:
        assert np.array_equal(actions, samples[0][1]) and np.array_equal(obs.state, samples[0][0].state)
        assert obs.instructions == samples[0][0].instructions
        assert all(np.array_equal(obs.images[name], samples[0][0].images[name]) for name in obs.images)


def test_folders_that_do_not_fit_are_refused(recorded: Any, folders: Any, tmp_path: Path) -> None:
    info, _ = recorded
    folder = folders[2.1, False]
    camera = next(iter(info.cameras))
    for keys, message in (
        (
            {"cameras": {camera: "observation.images.overhaed"}},
            "has no images 'observation.images.overhaed' for camera",
        ),
        ({"cameras": {"nose": "observation.images.wrist"}}, "the simulator has no camera 'nose'"),
        ({"action": "actions"}, "no feature 'actions'; did you mean 'action'"),
        ({"state": "action"}, r"its states have \d+ numbers and the simulator's have \d+"),
    ):
        with pytest.raises(UserError, match=message):
            opened(folder, info, **keys)
    with pytest.raises(
        UserError,
        match=r"none of 3 episodes holds a chunk of 99 actions; the longest has 12; set rollout.chunk to 12 or less",
    ):
        plugin.build(LeRobotConfig(folder=folder), DataContext(env=info, chunk=99))
    with pytest.raises(UserError, match=r"is not a LeRobot data set: it has no meta/info\.json"):
        opened(tmp_path, info)
    recordings.write_lerobot(tmp_path / "half", recorded[1], 2.1, True)
    (tmp_path / f"half/videos/chunk-000/observation.images.{camera}/episode_000001.mp4").unlink()
    with pytest.raises(UserError, match=r"is half downloaded: it lacks videos/chunk-000/.*episode_000001\.mp4"):
        opened(tmp_path / "half", info)
    assert opened(tmp_path / "half", info, episodes=1).num_samples() == STEPS - CHUNK + 1  # what is not read may lack
    meta = tmp_path / "half" / "meta" / "info.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"codebase_version": "v1.6"}))
    with pytest.raises(UserError, match=r"of LeRobot's format v1\.6; versions 2 and 3 are read"):
        opened(tmp_path / "half", info)


def test_numbers_need_no_copy_and_rows_may_be_in_any_file(
    recorded: Any, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 3 with the last episodes in the first file, in a folder whose name is a pattern."""
    info, episodes = recorded
    for video in (True, False):
        folder = tmp_path / f"[{video}] *"
        shutil.copytree(folders[3, video], folder)
        _in_two_files(folder)
        with monkeypatch.context() as patch:
            if video:
                patch.setattr("datasets.Dataset.from_parquet", None)  # only images in Parquet go through its cache
            obs, actions = opened(folder, info).read_samples(np.array([0, STEPS - CHUNK + 1]))
        for i in (0, 1):
            assert np.array_equal(actions[i], episodes[i]["actions"][:CHUNK])
            for camera in info.cameras:
                assert abs(obs.images[camera][i].astype(int) - episodes[i]["images"][camera][0]).mean() < 4


def _in_two_files(folder: Path) -> None:
    for file, column in (
        ("data/chunk-000/file-000.parquet", None),
        ("meta/episodes/chunk-000/file-000.parquet", "data/file_index"),
    ):
        table = pq.read_table(folder / file)
        late = np.array(table["episode_index"]) > 0
        if column:
            place = table.schema.get_field_index(column)
            table = table.set_column(place, column, pa.array(np.where(late, 0, 1)))
        pq.write_table(table.filter(pa.array(late)), folder / file)
        pq.write_table(table.filter(pa.array(~late)), (folder / file).with_name("file-001.parquet"))


@pytest.mark.parametrize("first", [pa.bool_(), pa.int64(), pa.float64()], ids=str)
def test_files_may_store_a_feature_as_different_types(recorded: Any, folders: Any, tmp_path: Path, first: Any) -> None:
    """Arrow would cast all files to the type of the first: 0.7 to True where that holds booleans."""
    info, episodes = recorded
    folder = tmp_path / "mixed"
    shutil.copytree(folders[3, False], folder)
    _in_two_files(folder)
    file = folder / "data" / "chunk-000" / "file-001.parquet"  # has the first episode
    table = pq.read_table(file)
    place = table.schema.get_field_index("action")
    whole = [[float(number > 0) for number in row] for row in table["action"].to_pylist()]
    pq.write_table(table.set_column(place, "action", pa.array(whole).cast(pa.list_(first))), file)
    windows = STEPS - CHUNK + 1
    _, actions = opened(folder, info).read_samples(np.array([0, windows]))
    assert np.array_equal(actions[0], episodes[0]["actions"][:CHUNK] > 0)
    assert np.array_equal(actions[1], episodes[1]["actions"][:CHUNK])


def _parquet(change: Callable[[dict[str, Any]], Any], file: str = "data/chunk-000/file-000.parquet") -> Any:
    def damage(folder: Path) -> None:
        columns = pq.read_table(folder / file).to_pydict()
        change(columns)
        pq.write_table(pa.table(columns), folder / file)

    return damage


def _cut(pattern: str) -> Any:
    def damage(folder: Path) -> None:
        for file in folder.glob(pattern):
            file.write_bytes(file.read_bytes()[:200])

    return damage


def _write_nan(columns: dict[str, Any]) -> None:
    columns["action"][STEPS + 2][0] = float("nan")


@pytest.mark.parametrize(
    ("video", "damage", "message"),
    [
        (
            True,
            _cut("data/*/*.parquet"),
            r"file-000\.parquet has no end, .*lost; .* `episodes: {exclude: \[\"0-2\"\]}`",
        ),
        (True, _cut("videos/*/*/*.mp4"), r"file-000\.mp4 cannot be opened \("),
        (False, _parquet(lambda c: c["observation.images.wrist"][0].update(bytes=b"")), "wrist cannot be decoded"),
        (True, _parquet(_write_nan), r"action of episode 1, step 2 is not finite: \[nan, .*\(1 in all\)"),
        (True, _parquet(lambda c: c.pop("action")), r"its rows cannot be read \(.*action"),
        (
            True,
            _parquet(lambda c: c["action"][1].pop()),
            r"action has lists of \[3, 2\] numbers, meta/info.json says 3",
        ),
        (True, _parquet(lambda c: c["task_index"].__setitem__(0, 7)), r"rows are of tasks \[7\], which meta/ does not"),
    ],
)
def test_damaged_folders_are_refused(
    video: bool, damage: Any, message: str, recorded: Any, folders: Any, tmp_path: Path
) -> None:
    shutil.copytree(folders[3, video], tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "copy", recorded[0]).read_samples(np.array([0]))


def _clone_spec(model: dict[str, Any], data: dict[str, Any], **imitation: Any) -> dict[str, Any]:
    return {
        "name": "clone",
        "model": model,
        "env": {"type": "tabletop", "num_envs": 4},
        "rollout": {"chunk": CHUNK, "episodes": 4, "group_size": 4, "max_steps": 8},
        "algorithm": {"type": "grpo"},
        "train": {"steps": 1, "lr": 1e-3, "micro_batch": 8},
        "eval": {"before": False, "episodes_per_task": 1},
        "runtime": {"backend": "local"},
        "hooks": [{"type": "jsonl"}],
        "imitation": {"data": data, "lr": 3e-3, "batch": 16, **imitation},
    }


def test_data_in_another_order_than_a_checkpoint_or_a_robot_are_refused(
    recorded: Any, folders: Any, tmp_path: Path
) -> None:
    info, _ = recorded
    folder = tmp_path / "named"
    shutil.copytree(folders[3, False], folder)
    file = folder / "meta" / "info.json"
    content = json.loads(file.read_text())
    names = [f"joint {number}" for number in range(info.action_dim)]
    states = {f"number {place}": info.state_dim - 1 - place for place in range(info.state_dim)}  # name -> place
    content["features"]["action"]["names"] = {"motors": names}
    content["features"]["observation.state"]["names"] = states
    file.write_text(json.dumps(content))
    properties = opened(folder, info).data_properties()
    assert properties.fps == recordings.FPS and properties.action_names == tuple(names)
    assert properties.state_names == tuple(reversed(states))

    data = opened(folder, info)
    simulator = evolve(info, action_names=tuple(names), state_names=tuple(reversed(states)))
    check_sample("data", data, "robot", simulator, CHUNK)
    for part in ("action", "state"):
        turned = evolve(simulator, **{f"{part}_names": tuple(reversed(getattr(simulator, f"{part}_names")))})
        with pytest.raises(UserError, match=f"data and robot have the numbers of the {part} in another order"):
            check_sample("data", data, "robot", turned, CHUNK)

    saved = load("model", "pi0")
    checkpoint = tmp_path / "checkpoint"
    saved.build(saved.config(preset="tiny"), ModelContext(env=info, chunk=CHUNK)).save(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"action_feature_names": names[::-1]}))
    model = {"type": "pi0", "checkpoint": str(checkpoint)}
    spec = _clone_spec(model, {"type": "lerobot", "folder": str(folder)}, steps=1)
    with pytest.raises(UserError, match="the simulator or data have the numbers of the action in another order"):
        clone(parse_spec(spec), tmp_path / "run", False)


def test_another_rate_than_the_robots_is_reported(
    recorded: Any, folders: Any, caplog: pytest.LogCaptureFixture
) -> None:
    info, _ = recorded
    data = opened(folders[3, False], info)
    caplog.clear()
    check_sample("data", data, "robot", evolve(info, control_hz=recordings.FPS), CHUNK)
    assert not caplog.records
    check_sample("data", data, "robot", evolve(info, control_hz=30), CHUNK)
    assert [record.getMessage() for record in caplog.records] == [
        "data has 10 actions a second and robot 30: the policy will move at another speed than it was shown"
    ]


@pytest.mark.parametrize("model", ["openvla_oft", "pi0"])
def test_a_clone_scales_by_the_data_and_says_so_in_its_checkpoint(
    model: str, recorded: Any, folders: Any, tmp_path: Path
) -> None:
    preset = {"openvla_oft": "fast", "pi0": "tiny"}[model]
    data = {"type": "lerobot", "folder": str(folders[3, False])}
    spec = _clone_spec({"type": model, "preset": preset}, data, steps=18, report_every=6, statistics="data")
    results = clone(parse_spec(spec), tmp_path / "run", False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss/imitation"] for line in lines if "loss/imitation" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
    last = tmp_path / "run" / "checkpoints" / "last"
    again = evaluate(parse_spec((tmp_path / "run" / "spec.yaml").read_text()), last.resolve())
    assert again["success"] == results["success"]

    every = np.concatenate([e["actions"] for e in recorded[1]])
    saved = load("model", model)
    policy = saved.build(saved.config(checkpoint=str(last / "model")), ModelContext(env=recorded[0], chunk=CHUNK))
    low, high = (np.quantile(every, q, axis=0) for q in (0.01, 0.99))
    if model == "openvla_oft":
        middle = policy.encode_actions(((low + high) / 2)[None, None].repeat(CHUNK, 1))
        assert abs(policy.decode_actions(middle)[0, 0].numpy() - (low + high) / 2).max() <= (high - low).max() / 250
        assert len(np.unique(policy.encode_actions(high[None, None].repeat(CHUNK, 1)))) <= 2
    else:
        from safetensors.numpy import load_file

        file = next((last / "model").glob("policy_preprocessor*.safetensors"))
        assert load_file(file)["action.mean"] == pytest.approx(every.mean(0), abs=1e-6)


@pytest.fixture(scope="module")
def pulsing(recorded: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which action 1 is 0 but for two steps of 300, as a gripper that pulses."""
    folder = tmp_path_factory.mktemp("pulsing")
    episode = recorded[1][0]
    actions = np.tile(episode["actions"], (25, 1))
    actions[:, 1] = 0
    actions[[100, 200], 1] = 0.5
    state = np.concatenate([np.tile(episode["state"][:-1], (25, 1)), episode["state"][-1:]])
    images = {name: np.concatenate([np.tile(i[:-1], (25, 1, 1, 1)), i[-1:]]) for name, i in episode["images"].items()}
    recordings.write_lerobot(
        folder / "set", [{**episode, "actions": actions, "state": state, "images": images}], 3, False
    )
    return folder / "set"


@pytest.mark.parametrize("model", ["openvla_oft", "film_resnet", "pi05"])
def test_an_action_that_is_rarely_another_value_can_be_made(
    model: str, pulsing: Path, recorded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    preset = {"openvla_oft": {"preset": "fast"}, "film_resnet": {}, "pi05": {"preset": "tiny"}}[model]
    data = {"type": "lerobot", "folder": str(pulsing)}
    spec = _clone_spec({"type": model, **preset}, data, steps=3, report_every=1, statistics="data")
    clone(parse_spec(spec), tmp_path / "run", False)
    assert "action 1: 99 % of the steps lie in 0 to 0, it reaches 0.5" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["loss/imitation"] for line in lines if "loss/imitation" in line) < 100
    saved = load("model", model)
    folder = str(tmp_path / "run" / "checkpoints" / "last" / "model")
    policy = saved.build(saved.config(checkpoint=folder), ModelContext(env=recorded[0], chunk=CHUNK))
    if model == "openvla_oft":
        wanted = np.zeros((1, CHUNK, recorded[0].action_dim), np.float32)
        wanted[:, 0, 1] = 0.5
        made = policy.decode_actions(policy.encode_actions(wanted)).numpy()
        assert abs(made[..., 1] - wanted[..., 1]).max() < 0.01


def test_frames_late_in_a_long_file_are_found(tmp_path: Path) -> None:
    """lerobot refuses frames from 1,024 s of a file on, where float32 no longer tells them from their neighbours by its
    tolerance."""
    av = pytest.importorskip("av")
    start, fps, frames = 4096.0, 30, 40
    with av.open(str(tmp_path / "film.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in [None, *range(frames)]:
            shade = 0 if number is None else 40 + 5 * number
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), shade, np.uint8), "rgb24")
            frame.time_base = Fraction(1, fps)
            frame.pts = 0 if number is None else round(start * fps) + number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    videos = Videos(fps, 32 * 32)
    for number in np.random.default_rng(0).permutation(frames).tolist():
        seconds = start + float(np.float32(number / fps))  # a row's clock is stored as float32
        shade = int(videos.read_frame(tmp_path / "film.mp4", seconds)[16, 16, 0])
        assert abs(shade - (40 + 5 * number)) <= 2, f"frame {number} is another one"
    with pytest.raises(UserError, match="has no frame at 4098.000 s"):
        videos.read_frame(tmp_path / "film.mp4", start + 2.0)
