"""RLDS data sets as TensorFlow Datasets writes them. The files are made with protobuf's own encoder."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.core.catalogue import load
from vla_rl.core.contexts import DataContext, EnvContext
from vla_rl.core.errors import UserError
from vla_rl.plugins.data.rlds import plugin
from vla_rl.plugins.data.rlds.config import RLDSConfig
from vla_rl.plugins.data.rlds.tfrecord import find_records, read_example
from vla_rl.testing import check_data
from vla_rl.toolkit.data.episodes import EpisodeSelection
from vla_rl.toolkit.data.inspection.report import inspect_recordings

recordings = pytest.importorskip("recordings", reason="needs the extra: pip install -e '.[data]'")
protobuf = pytest.importorskip("google.protobuf")

CHUNK, STEPS = 4, 7
CAMERAS = {"overhead": "observation/image", "wrist": "observation/wrist_image"}
NAME = "tabletop_no_noops-train.tfrecord"


def example_class() -> Any:
    """Return the message tf.train.Example, after TensorFlow's example.proto and feature.proto."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="test", syntax="proto3")
    types = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, str | None], repeated: bool = False) -> Any:
        made = file.message_type.add(name=name)
        for field, number, kind, of in fields:
            label = types.LABEL_REPEATED if repeated else types.LABEL_OPTIONAL
            made.field.add(name=field, number=number, type=kind, label=label, type_name=of and f".test.{of}")
        return made

    message("BytesList", ("value", 1, types.TYPE_BYTES, None), repeated=True)
    message("FloatList", ("value", 1, types.TYPE_FLOAT, None), repeated=True)
    message("Int64List", ("value", 1, types.TYPE_INT64, None), repeated=True)
    lists = (("bytes_list", 1, "BytesList"), ("float_list", 2, "FloatList"), ("int64_list", 3, "Int64List"))
    message("Feature", *((name, number, types.TYPE_MESSAGE, of) for name, number, of in lists))
    entry = message("FeatureEntry", ("key", 1, types.TYPE_STRING, None), ("value", 2, types.TYPE_MESSAGE, "Feature"))
    message("Features", ("feature", 1, types.TYPE_MESSAGE, entry.name), repeated=True)
    message("Example", ("features", 1, types.TYPE_MESSAGE, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.Example"))


def written(features: dict[str, Any]) -> bytes:
    """Encode features: lists of bytes, or arrays of floats or integers."""
    example = example_class()()
    for name, value in features.items():
        entry = example.features.feature.add(key=name)
        if isinstance(value, list):
            entry.value.bytes_list.value.extend(value)
        elif value.dtype.kind == "f":
            entry.value.float_list.value.extend(value.reshape(-1).tolist())
        else:
            entry.value.int64_list.value.extend(value.reshape(-1).tolist())
    return example.SerializeToString()


def features_of(episode: dict[str, Any]) -> dict[str, Any]:
    """Return the features of an episode, named as in the LIBERO data sets of OpenVLA's authors."""
    steps = len(episode["actions"])
    marks = np.arange(steps)
    named = {"overhead": "image", "wrist": "wrist_image"}
    encoded_images = {
        f"steps/observation/{named.get(name, name)}": [recordings._png(image) for image in images[:-1]]
        for name, images in episode["images"].items()
    }
    return {
        **encoded_images,
        "steps/action": episode["actions"],
        "steps/observation/state": episode["state"][:-1],
        "steps/language_instruction": [episode["instruction"].encode()] * steps,
        "steps/is_first": (marks == 0).astype(np.int64),
        "steps/reward": -marks.astype(np.int64),
        "episode_metadata/file_path": [b"somewhere"],
        "episode_metadata/language_instruction": [episode["instruction"].encode()],
    }


def write(folder: Path, shards: list[list[dict[str, Any]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, examples in enumerate(shards):
        with (folder / f"{NAME}-{number:05d}-of-{len(shards):05d}").open("wb") as file:
            for features in examples:
                record = written(features)
                file.write(struct.pack("<Q", len(record)) + b"crc1" + record + b"crc2")


@pytest.fixture(scope="module")
def recorded() -> Any:
    tabletop = load("env", "tabletop")
    env = tabletop.build(tabletop.config(), EnvContext(num_envs=1, chunk=1))
    return env.info, recordings.record(env, [state.id for state in env.reset_states("train")[:3]], STEPS)


@pytest.fixture(scope="module")
def folder(recorded: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home: Path = tmp_path_factory.mktemp("rlds")
    one, two, three = map(features_of, recorded[1])
    write(home / "tabletop_no_noops" / "1.0.0", [[one, two], [three]])
    return home


def opened(folder: Path, info: Any, **keys: Any) -> Any:
    return plugin.build(RLDSConfig(folder=folder, **{"cameras": CAMERAS, **keys}), DataContext(env=info, chunk=CHUNK))


def test_what_was_recorded_is_read(folder: Path, recorded: Any) -> None:
    info, episodes = recorded
    check_data(plugin, RLDSConfig(folder=folder, cameras=CAMERAS), env=info, chunk=CHUNK)
    data = opened(folder, info)
    windows = STEPS - CHUNK + 1
    assert data.num_samples() == 3 * windows
    chosen = np.array([2 * windows + 3, 0, windows - 1, windows])
    obs, actions = data.read_samples(chosen)
    for i, sample in enumerate(chosen):
        episode, t = episodes[sample // windows], sample % windows
        assert np.array_equal(actions[i], episode["actions"][t : t + CHUNK])
        assert np.array_equal(obs.state[i], episode["state"][t])
        assert obs.instructions[i] == episode["instruction"]
        for camera in info.cameras:
            assert np.array_equal(obs.images[camera][i], episode["images"][camera][t])
    every = np.concatenate([episode["actions"] for episode in episodes])
    assert data.data_statistics()["action"]["q99"] == pytest.approx(np.quantile(every, 0.99, axis=0), abs=1e-6)
    for ends in ("drop", "repeat"):
        recordings.check_differences(opened(folder, info, ends=ends), (None, None, 2))


@pytest.mark.parametrize("filling", [0.0, np.nan])
def test_actions_that_a_writer_filled_in_are_left_out(
    recorded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, filling: float
) -> None:
    """EnvLogger's last step of an episode has an observation and no action."""
    info, episodes = recorded
    filled = [{**episode, "actions": episode["actions"].copy()} for episode in episodes]
    for episode in filled:
        episode["actions"][-1] = filling
    write(tmp_path / "filled", [[features_of(episode) for episode in filled]])
    data = opened(tmp_path / "filled", info, ends="repeat")
    assert "last action of every episode" in caplog.text
    assert data.num_samples() == 3 * (STEPS - 1)
    _, actions = data.read_samples(np.array([STEPS - 2]))
    assert (actions == episodes[0]["actions"][-2]).all(), "the repeated action is the last one that was executed"
    caplog.clear()
    assert opened(tmp_path / "filled", info, ends="repeat", last_action="drop").num_samples() == 3 * (STEPS - 1)
    if filling == 0:
        assert opened(tmp_path / "filled", info, ends="repeat", last_action="keep").num_samples() == 3 * STEPS
    filled[1]["actions"][-1] = 0.25  # a writer that stores an action there
    for episode in filled[::2]:
        episode["actions"][-1] = 0
    write(tmp_path / "mixed", [[features_of(episode) for episode in filled]])
    assert opened(tmp_path / "mixed", info, ends="repeat").num_samples() == 3 * STEPS
    assert not caplog.records


def test_a_step_alone_cannot_be_left_out(recorded: Any, tmp_path: Path) -> None:
    info, episodes = recorded
    one = {
        **episodes[0],
        "actions": episodes[0]["actions"][:1],
        "state": episodes[0]["state"][:2],
        "images": {name: images[:2] for name, images in episodes[0]["images"].items()},
    }
    write(tmp_path, [[features_of(one), features_of(episodes[1])]])
    with pytest.raises(UserError, match=r"last_action: drop leaves no step of 0; `episodes: .exclude: .0"):
        opened(tmp_path, info, last_action="drop")


def test_idle_steps_are_left_out(recorded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each step is written twice, the second time with a black image, so that the right one is seen to be read."""
    info, episodes = recorded
    twice = []
    for episode in episodes:
        steps = np.arange(STEPS).repeat(2)
        images = {name: np.concatenate([shown[steps], shown[-1:]]) for name, shown in episode["images"].items()}
        for shown in images.values():
            shown[1:-1:2] = 0
        state = np.concatenate([episode["state"][steps], episode["state"][-1:]])
        twice.append({**episode, "actions": episode["actions"][steps], "state": state, "images": images})
    write(tmp_path, [[features_of(episode) for episode in twice]])
    data, plain = opened(tmp_path, info, drop_no_ops=True, ends="repeat"), opened(tmp_path, info, ends="repeat")
    (found,) = [line for line in caplog.messages if "drop_no_ops" in line]
    idle = 6 * STEPS - data.num_samples()
    assert found == f"{tmp_path}: drop_no_ops leaves out {idle} of {6 * STEPS} steps, in which nothing moves"
    assert idle >= 3 * STEPS  # an expert may rest as well
    obs, actions = data.read_samples(np.arange(data.num_samples()))
    assert all(image.max() > 0 for shown in obs.images.values() for image in shown)
    assert np.array_equal(actions[0, 1], episodes[0]["actions"][1])
    assert plain.num_samples() == 6 * STEPS


def test_a_folder_is_inspected(folder: Path, recorded: Any, tmp_path: Path) -> None:
    inspected = inspect_recordings(plugin.inspect(folder))
    assert inspected.findings == []
    episode = inspected.data.episodes[1]
    assert np.array_equal(episode.vectors["action"], recorded[1][1]["actions"])
    assert episode.task == recorded[1][1]["instruction"] and len(episode) == STEPS
    image = inspected.data.read_image(episode, "observation/image", 2)
    assert np.array_equal(image, recorded[1][1]["images"]["overhead"][2])
    features = [features_of(one) for one in recorded[1]]
    features[1]["steps/action"] = np.full((STEPS, 3), np.nan)
    del features[2]["steps/action"]
    write(tmp_path, [features])
    findings = {finding.episodes: finding.message for finding in inspect_recordings(plugin.inspect(tmp_path)).findings}
    assert set(findings) == {(1,), (2,)}
    assert "is nan" in findings[(1,)] and "has no action; it has: observation/state, reward" in findings[(2,)]


def test_settings(folder: Path, recorded: Any) -> None:
    info, episodes = recorded
    assert opened(folder, info, episodes=1).num_samples() == STEPS - CHUNK + 1
    repeating = opened(folder / "tabletop_no_noops", info, ends="repeat")
    assert repeating.num_samples() == 3 * STEPS
    _, actions = repeating.read_samples(np.array([STEPS - 1]))
    assert np.array_equal(actions[0], episodes[0]["actions"][[-1] * CHUNK])
    of_the_episode = opened(folder, info, instruction="episode_metadata/language_instruction")
    assert of_the_episode.read_samples(np.array([0]))[0].instructions == (episodes[0]["instruction"],)


def test_episodes_are_chosen_by_their_number_in_the_files(folder: Path, recorded: Any, tmp_path: Path) -> None:
    info, episodes = recorded
    windows = STEPS - CHUNK + 1
    for choice, numbers in (((2,), [2]), (("0-1",), [0, 1]), (EpisodeSelection(exclude=(1,)), [0, 2])):
        data = opened(folder, info, episodes=choice)
        assert data.num_samples() == len(numbers) * windows
        _, actions = data.read_samples(np.arange(len(numbers)) * windows)
        assert np.array_equal(actions, [episodes[number]["actions"][:CHUNK] for number in numbers])
    for choice, message in (
        ((7,), "has no episode 7, .*; it has 0-2"),
        (EpisodeSelection(exclude=("0-2",)), "`episodes` excludes all 3 episodes"),
    ):
        with pytest.raises(UserError, match=message):
            opened(folder, info, episodes=choice)
    one, two, three = map(features_of, episodes)
    write(tmp_path, [[one, {"steps/action": two["steps/action"]}], [three]])
    with pytest.raises(UserError, match="has no steps/is_first"):
        opened(tmp_path, info)
    assert opened(tmp_path, info, episodes=EpisodeSelection(exclude=(1,))).num_samples() == 2 * windows


def test_episodes_are_chosen_by_reward_and_task(folder: Path, recorded: Any, tmp_path: Path) -> None:
    info, episodes = recorded
    one, two, three = map(features_of, episodes)
    rewarded = {"steps/reward": (np.arange(STEPS) == STEPS - 1).astype(np.float32)}
    renamed = {"steps/language_instruction": [b"wave"] * STEPS}
    write(tmp_path, [[one, two | rewarded | renamed], [three | rewarded]])
    for choice, numbers in (
        (EpisodeSelection(success=True), [1, 2]),
        (EpisodeSelection(success=False), [0]),
        (EpisodeSelection(tasks=("wave",)), [1]),
        (EpisodeSelection(tasks=("wave",), success=True, exclude=(0,)), [1]),
    ):
        data = opened(tmp_path, info, episodes=choice)
        windows = STEPS - CHUNK + 1
        assert data.num_samples() == len(numbers) * windows
        _, actions = data.read_samples(np.arange(len(numbers)) * windows)
        assert np.array_equal(actions, [episodes[number]["actions"][:CHUNK] for number in numbers])
    with pytest.raises(UserError, match="none of 2 episodes meets the conditions"):
        opened(tmp_path, info, episodes=EpisodeSelection(success=False, exclude=(0,)))


def test_an_episode_without_steps_is_left_out(recorded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    info, episodes = recorded
    one, two, three = map(features_of, episodes)
    empty = {name: value[:0] for name, value in two.items()}
    write(tmp_path, [[one, empty, three]])
    assert opened(tmp_path, info).num_samples() == 2 * (STEPS - CHUNK + 1)
    line, _ = (record.getMessage() for record in caplog.records)
    assert line.endswith("episodes 1 have no steps and are left out")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"split": "val"}, r"holds no files NAME-val\.tfrecord-00000-of-\.\.\.; it has the splits train"),
        ({"action": "actoin"}, r"has no feature 'actoin'; did you mean 'action'"),
        ({"action": "language_instruction"}, "language_instruction holds texts or images, numbers are expected"),
        (
            {"cameras": {**CAMERAS, "overhead": "observation/imgae"}},
            r"has no images 'observation/imgae' for camera 'overhead'; did you mean",
        ),
        ({"instruction": "reward"}, "reward holds numbers, texts or images are expected"),
        ({"state": "action"}, "its states have"),
    ],
)
def test_keys_that_do_not_fit_are_refused(folder: Path, recorded: Any, keys: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(folder, recorded[0], **keys)


def shard(folder: Path, number: int) -> Path:
    return next(folder.rglob(f"*{number:05d}-of-00002"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shard(folder, 1).unlink(), "there is 1 file, their names say 00002; download it again"),
        (lambda folder: shard(folder, 1).write_bytes(shard(folder, 1).read_bytes()[:-9]), "ends behind the file"),
        (lambda folder: shard(folder, 0).write_bytes(b"\xff" * 64), "ends behind the file"),
        (
            lambda folder: shard(folder, 0).write_bytes(struct.pack("<Q", 3) + b"crc1" + b"\x0a\x7fx" + b"crc2"),
            r"is not a tf\.train\.Example \(a field ends behind its message\)",
        ),
        (
            lambda folder: (folder / "other").mkdir() or write(folder / "other" / "2.0.0", [[]]),
            "holds 2 data sets",
        ),
        (lambda folder: [file.write_bytes(b"") for file in folder.rglob("*-of-*")], "its files are empty"),
    ],
)
def test_damaged_folders_are_refused(recorded: Any, tmp_path: Path, damage: Any, message: str) -> None:
    one, two, three = map(features_of, recorded[1])
    write(tmp_path / "tabletop_no_noops" / "1.0.0", [[one, two], [three]])
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        opened(tmp_path, recorded[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps/is_first": None}, "has no steps/is_first"),
        ({"steps/action": np.zeros(3 * STEPS - 1, np.float32)}, "action has 20 numbers in an episode of 7 steps"),
        ({"steps/language_instruction": [b"\xff"] * STEPS}, "an instruction is not UTF-8"),
        (
            {"steps/language_instruction": [b"once"]},
            r"an episode of 7 steps has 1 instructions; repair episode 1, .*`episodes: {exclude: \[1\]}`",
        ),
        ({"steps/observation/image": [b"no image"] * STEPS}, r"an image of observation/image cannot be decoded"),
        ({"steps/observation/state": np.full((STEPS, 2), np.nan, np.float32)}, "state of episode 1, step 0 is not"),
    ],
)
def test_damaged_episodes_are_refused(recorded: Any, tmp_path: Path, changes: Any, message: str) -> None:
    info, episodes = recorded
    sound, broken = features_of(episodes[0]), features_of(episodes[1])
    if "steps/observation/state" in changes:
        changes = {"steps/observation/state": np.full_like(broken["steps/observation/state"], np.nan)}
    broken = {name: value for name, value in {**broken, **changes}.items() if value is not None}
    write(tmp_path, [[sound, broken]])
    with pytest.raises(UserError, match=message):
        opened(tmp_path, info)


def test_an_image_that_is_none_is_named_when_it_is_read(recorded: Any, tmp_path: Path) -> None:
    """Only the first one of an episode is looked at before."""
    info, episodes = recorded
    features = features_of(episodes[0])
    features["steps/observation/image"][2] = b"no image"
    write(tmp_path, [[features]])
    with pytest.raises(UserError, match=r"an image of observation/image cannot be decoded"):
        opened(tmp_path, info).read_samples(np.array([2]))


def test_a_byte_string_keeps_the_zeros_at_its_end(tmp_path: Path) -> None:
    """NumPy's byte strings drop them, which cuts raw pixels; here a byte string is as long as its record says."""
    stored = [b"\x01\x00\x00", b"\x00\x00"]
    write(tmp_path, [[{"steps/raw": stored}]])
    [record] = find_records(next(tmp_path.iterdir()))
    example = read_example(record)
    spans = example.features["steps/raw"].spans
    assert spans is not None and [example.read_span(span) for span in spans] == stored
    assert np.array(stored).tolist() != stored, "NumPy keeps them now: change the page of surprises"
