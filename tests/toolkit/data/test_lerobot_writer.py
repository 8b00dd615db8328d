"""Data sets in LeRobot's format: written, gone on with, broken off, and read by our own reader."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from PIL import Image

from fork_server import ForkServer
from vla_rl.core.contexts import DataContext
from vla_rl.core.errors import UserError
from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.plugins.data.lerobot import plugin as reader
from vla_rl.plugins.data.lerobot.config import LeRobotConfig
from vla_rl.toolkit.data.recording import Recording, encode_png

pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra: pip install -e '.[data]'")
pytest.importorskip("datasets", reason="needs the extra: pip install -e '.[data]'")

from vla_rl.toolkit.data import lerobot  # noqa: E402
from vla_rl.toolkit.data.lerobot import LeRobotWriter  # noqa: E402
from vla_rl.toolkit.data.samples import check_sample  # noqa: E402

CHUNK = 3
INFO = EnvInfo(
    cameras={"front": (8, 6)},
    state_dim=2,
    action_low=(-1.0,) * 4,
    action_high=(1.0,) * 4,
    tasks=(TaskInfo(name="a", instruction="do a", max_steps=9),),
)


def frames(seed: int, length: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (length, 8, 6, 3), dtype=np.uint8)


def episode(seed: int, length: int = 5, *, chunks: bool = False, **changes: Any) -> Recording:
    random = np.random.default_rng(seed)
    shape = (length, CHUNK, 4) if chunks else (length, 4)
    recording = Recording(
        images={"front": [encode_png(image) for image in frames(seed, length)]},
        sizes={"front": (8, 6)},
        state=random.normal(size=(length, 2)).astype(np.float32),
        actions=random.uniform(-1, 1, shape).astype(np.float32),
        instruction=f"do {'ab'[seed % 2]}",
        task="ab"[seed % 2],
        identity=f"episode {seed}",
        success=seed % 2 == 0,
        rewards=random.normal(size=length).astype(np.float32),
        executed=np.full(length, CHUNK) if chunks else None,
    )
    return evolve(recording, **changes)


def write(folder: Path, recordings: list[Recording], **keys: Any) -> list[bool]:
    with LeRobotWriter(folder, **{"fps": 10, "robot": "arm", **keys}) as writer:
        return [writer.add(recording) for recording in recordings]


def read(folder: Path, chunk: int = CHUNK) -> Any:
    return reader.build(LeRobotConfig(folder=folder), DataContext(env=INFO, chunk=chunk))


def info_of(folder: Path) -> Any:
    return json.loads((folder / "meta" / "info.json").read_text())


@pytest.mark.parametrize("chunks", [False, True])
def test_what_is_written_is_read(tmp_path: Path, chunks: bool) -> None:
    episodes = [episode(seed, length, chunks=chunks) for seed, length in enumerate((5, 3, 4))]
    assert write(tmp_path / "set", episodes) == [True] * 3
    data = read(tmp_path / "set")
    starts = [(e, t) for e in episodes for t in range(len(e) if chunks else len(e) - CHUNK + 1)]
    assert data.num_samples() == len(starts)
    obs, actions = data.read_samples(np.arange(len(starts)))
    for i, (recorded, t) in enumerate(starts):
        wanted = recorded.actions[t] if chunks else recorded.actions[t : t + CHUNK]
        assert np.array_equal(actions[i], wanted)
        assert np.array_equal(obs.state[i], recorded.state[t])
        assert obs.instructions[i] == recorded.instruction
        assert np.array_equal(obs.images["front"][i], np.asarray(Image.open(io.BytesIO(recorded.images["front"][t]))))
    if chunks:
        with pytest.raises(UserError, match=r"recorded chunks of 3 actions, and rollout\.chunk is 2; give rollout"):
            read(tmp_path / "set", 2)


def test_the_end_of_an_episode_is_seen_where_that_is_asked_for(tmp_path: Path) -> None:
    """Every step begins a chunk then, filled with the last action of the same episode."""
    episodes = [episode(0, 2), episode(1, 4)]
    write(tmp_path, episodes)
    config = LeRobotConfig(folder=tmp_path, ends="repeat")
    data = reader.build(config, DataContext(env=INFO, chunk=CHUNK))
    assert data.num_samples() == 6
    obs, actions = data.read_samples(np.array([5, 0, 1, 2]))
    first, second = (e.actions for e in episodes)
    wanted = [second[[3, 3, 3]], first[[0, 1, 1]], first[[1, 1, 1]], second[[0, 1, 2]]]
    assert np.array_equal(actions, wanted)
    assert np.array_equal(obs.state, [episodes[1].state[3], *episodes[0].state, episodes[1].state[0]])


def test_statistics_are_those_of_all_rows(tmp_path: Path) -> None:
    episodes = [episode(seed, length) for seed, length in enumerate((5, 9, 2))]
    write(tmp_path, episodes[:2])
    write(tmp_path, episodes[2:])  # another writer adds to what is there
    found = json.loads((tmp_path / "meta" / "stats.json").read_text())
    for name, rows in (
        ("action", np.concatenate([e.actions for e in episodes])),
        ("observation.state", np.concatenate([e.state for e in episodes])),
        ("next.reward", np.concatenate([e.rewards for e in episodes])[:, None]),
    ):
        assert found[name]["mean"] == pytest.approx(rows.mean(0), abs=1e-6)
        assert found[name]["std"] == pytest.approx(rows.std(0), abs=1e-6)
        assert found[name]["min"] == pytest.approx(rows.min(0)) and found[name]["max"] == pytest.approx(rows.max(0))
        assert found[name]["count"] == [16]
        for key, share in (("q01", 0.01), ("q50", 0.5), ("q99", 0.99)):
            assert found[name][key] == pytest.approx(np.quantile(rows, share, axis=0), abs=1e-6)
    pixels = np.concatenate([frames(seed, length) for seed, length in enumerate((5, 9, 2))]) / 255
    shown = found["observation.images.front"]
    assert np.array(shown["mean"]).shape == (3, 1, 1) and shown["count"] == [16]
    assert np.ravel(shown["mean"]) == pytest.approx(pixels.mean((0, 1, 2)))
    assert np.ravel(shown["std"]) == pytest.approx(pixels.std((0, 1, 2)))


def test_images_weigh_by_rows(tmp_path: Path) -> None:
    """16 black and 480 white rows, of which 16 images each are read, are 480 / 496 white; also after it continues."""
    colours = {0: 16, 255: 480}
    episodes = [
        episode(i, length, images={"front": [encode_png(np.full((8, 6, 3), colour, np.uint8))] * length})
        for i, (colour, length) in enumerate(colours.items())
    ]
    for folder, parts in ((tmp_path / "once", [episodes]), (tmp_path / "twice", [episodes[:1], episodes[1:]])):
        for part in parts:
            write(folder, part)
        shown = json.loads((folder / "meta" / "stats.json").read_text())["observation.images.front"]
        assert np.ravel(shown["mean"]) == pytest.approx([480 / 496] * 3) and shown["count"] == [496]


def test_numbering_continues_and_nothing_is_there_twice(tmp_path: Path) -> None:
    assert write(tmp_path, [episode(0), episode(1)]) == [True, True]
    assert write(tmp_path, [episode(1), episode(2), episode(2)]) == [False, True, False]
    rows = [pq.read_table(tmp_path / f"data/chunk-000/file-00{i}.parquet").to_pydict() for i in range(3)]
    assert [row["episode_index"][0] for row in rows] == [0, 1, 2]
    assert [row["index"] for row in rows] == [list(range(5)), list(range(5, 10)), list(range(10, 15))]
    assert [row["task_index"][0] for row in rows] == [0, 1, 0]
    assert rows[2]["timestamp"] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert rows[2]["next.done"] == [False] * 4 + [True] and rows[2]["next.success"][-1] is True
    info = info_of(tmp_path)
    assert (info["codebase_version"], info["total_episodes"], info["total_frames"]) == ("v3.0", 3, 15)
    assert (info["total_tasks"], info["splits"], info["fps"]) == (2, {"train": "0:3"}, 10)


def test_lists_of_episodes_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot, "LISTED", 3)
    one = episode(0, 1, images={}, sizes={})
    write(tmp_path, [evolve(one, identity=f"{i}") for i in range(5)])
    write(tmp_path, [evolve(one, identity="more")])
    lists = sorted((tmp_path / "meta" / "episodes").rglob("*.parquet"))
    found = [pq.read_table(file)["episode_index"].to_pylist() for file in lists]
    assert found == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("moment", range(5))
def test_a_killed_writer_leaves_whole_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """At each of the five files that the second episode changes: tasks, rows, list, statistics, info."""
    write(tmp_path, [episode(0)])
    left, replace = [moment], os.replace

    def killed(*paths: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, [episode(1)])
    listed = 2 if moment > 2 else 1
    assert read(tmp_path).num_samples() == listed * 3
    assert write(tmp_path, [episode(1), episode(2)]) == [listed == 1, True]
    assert read(tmp_path).num_samples() == 9
    assert info_of(tmp_path)["total_episodes"] == 3 and info_of(tmp_path)["total_tasks"] == 2


def origins(folder: Path) -> list[tuple[int, str, str, bool | None]]:
    lines = [json.loads(line) for line in (folder / "meta" / "vla_rl.jsonl").read_text().splitlines()]
    return [(line["episode_index"], line["identity"], line["task"], line["success"]) for line in lines]


def test_the_origin_of_an_episode_has_a_separate_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lerobot cannot append to lists of episodes with other columns than its own."""
    replace, names = os.replace, {"a\u2028b": "a", "c\nd": "b"}

    def full_at_the_list(source: Any, target: Path) -> None:
        if "episodes" in target.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    recordings = [episode(i, identity=identity, task=task) for i, (identity, task) in enumerate(names.items())]
    with LeRobotWriter(tmp_path, fps=10, robot="arm") as writer:
        writer.add(recordings[0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full_at_the_list)
            with pytest.raises(OSError, match="No space"):
                writer.add(episode(7))
        writer.add(recordings[1])
        writer.add(episode(3))
    expected = [(0, "a\u2028b", "a", True), (1, "c\nd", "b", False), (2, "episode 3", "b", False)]
    assert origins(tmp_path) == expected
    file = tmp_path / "meta" / "vla_rl.jsonl"
    with file.open("a") as lines:
        lines.write('{"episode_index": 3, "identity": "of a killed writer"}\n{"epis')
    assert write(tmp_path, [recordings[0], episode(4)]) == [False, True]
    assert origins(tmp_path) == [*expected, (3, "episode 4", "a", True)]
    columns = pq.read_schema(tmp_path / "meta/episodes/chunk-000/file-000.parquet").names
    assert not [name for name in columns if name.startswith("vla_rl")]
    statistics = {name.split("/")[1] for name in columns if name.startswith("stats/")}
    assert statistics == info_of(tmp_path)["features"].keys()


def test_data_to_which_another_program_has_appended_are_not_appended_to(tmp_path: Path) -> None:
    write(tmp_path, [episode(0), episode(1)])
    file = tmp_path / "meta" / "vla_rl.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    with pytest.raises(UserError, match=r"another program has appended to this data set \(2 episodes, .* lists 1\)"):
        write(tmp_path, [episode(2)])
    file.unlink()
    with pytest.raises(UserError, match="this program did not write"):
        write(tmp_path, [episode(2)])


def test_other_episodes_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [episode(0)])
    for recording, message in (
        (episode(1, chunks=True), r"action: float32 \[3, 4\] here, float32 \[4\] there"),
        (episode(1, images={}, sizes={}), r"observation\.images\.front: nothing here, image \[8, 6, 3\] there"),
        (episode(1, success=None), r"next\.success: nothing here, bool \[1\] there(.|\n)*choose another folder"),
    ):
        with pytest.raises(UserError, match=message):
            write(tmp_path, [recording])
    with pytest.raises(UserError, match=r"its fps is 10, and what comes now has 20"):
        write(tmp_path, [], fps=20)
    with pytest.raises(UserError, match=r"its robot_type is 'arm', and what comes now has 'hand'"):
        write(tmp_path, [], robot="hand")
    with pytest.raises(UserError, match="without rows"):
        write(tmp_path / "empty", [episode(0, 0)])
    assert info_of(tmp_path)["total_episodes"] == 1


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is neither a LeRobot data set nor empty \(it has notes\.txt\)"):
        write(tmp_path, [])
    with pytest.raises(UserError, match="is a file"):
        write(tmp_path / "notes.txt", [])
    write(tmp_path / "set", [episode(0)])
    file = tmp_path / "set" / "meta" / "info.json"
    file.write_text(json.dumps(info_of(tmp_path / "set") | {"data_path": "data/all.parquet"}))
    with pytest.raises(UserError, match="in another layout than this program writes"):
        write(tmp_path / "set", [])
    file.write_text(json.dumps({"codebase_version": "v2.1", "features": {}}))
    with pytest.raises(UserError, match=r"this program did not write \(KeyError"):
        write(tmp_path / "set", [])


def test_there_is_one_writer(tmp_path: Path, fork_server: ForkServer) -> None:
    code = (
        "import sys; from pathlib import Path; from vla_rl.toolkit.data.lerobot import LeRobotWriter\n"
        "writer = LeRobotWriter(Path(sys.argv[1]), fps=10, robot='arm'); print('open', flush=True); sys.stdin.read()"
    )
    other = fork_server.start_python("-c", code, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == "open\n"
    with pytest.raises(UserError, match="another process writes to this data set"):
        write(tmp_path, [])
    other.kill()
    other.wait()
    first = LeRobotWriter(tmp_path, fps=10, robot="arm")  # the lock ended with its process
    assert first.add(episode(0))
    assert write(tmp_path, [episode(1)]) == [True]  # in this process the newest writes
    with pytest.raises(UserError, match="another one has taken over"):
        first.add(episode(2))


@pytest.mark.parametrize("chunks", [False, True])
def test_rewards_come_back(tmp_path: Path, chunks: bool) -> None:
    episodes = [episode(seed, 5, chunks=chunks) for seed in range(2)]
    write(tmp_path, episodes)
    data = read(tmp_path)
    recorded = data.read_rewards(np.arange(data.num_samples()), 0.5)
    rewards = [np.asarray(one.rewards, np.float64) for one in episodes]
    if chunks:  # a row is a sample, and the next row follows it
        np.testing.assert_allclose(recorded.rewards, np.concatenate(rewards), rtol=1e-6)
        assert recorded.following.tolist() == [1, 2, 3, 4, -1, 6, 7, 8, 9, -1]
    else:  # rows 0, 1 and 2 of 5 start samples; none starts where their chunks end
        weights = 0.5 ** np.arange(5)
        expected = [one[start:] @ weights[: 5 - start] for one in rewards for start in range(3)]
        np.testing.assert_allclose(recorded.rewards, expected, rtol=1e-6)
        assert recorded.following.tolist() == [-1] * 6


def test_data_without_rewards_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, [episode(0, 5, rewards=None)])
    with pytest.raises(UserError, match=r"no feature 'next.reward' with rewards"):
        read(tmp_path).read_rewards(np.arange(3), 0.9)


def test_names_come_back_and_other_ones_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, [episode(0, action_names=tuple("abcd"), state_names=("x", "y"))])
    data = read(tmp_path)
    caplog.clear()
    properties = data.data_properties()
    assert (properties.action_names, properties.state_names) == (tuple("abcd"), ("x", "y"))
    same = evolve(INFO, action_names=tuple("ABCD"), state_names=("x", "y"))
    check_sample("data", data, "robot", same, CHUNK)
    assert not caplog.messages
    check_sample("data", data, "robot", evolve(same, action_names=("a", "b", "c", "e")), CHUNK)
    (said,) = caplog.messages
    assert said.startswith("the numbers of the action have other names in data (a, b, c, d) than in robot (a, b, c, e)")
    with pytest.raises(UserError, match="data and robot have the numbers of the state in another order"):
        check_sample("data", data, "robot", evolve(same, state_names=("y", "x")), CHUNK)
