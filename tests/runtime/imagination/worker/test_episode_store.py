"""The recorder: windows at the edges of episodes, what is held out, bounds, and that a killed run finds its data."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from recorded_episodes import CHUNK

from vla_rl import EnvInfo, TaskInfo, UserError
from vla_rl.runtime.imagination.interfaces import RecordedEpisode
from vla_rl.runtime.imagination.worker import episode_files as module
from vla_rl.runtime.imagination.worker.episode_files import EpisodeShape
from vla_rl.runtime.imagination.worker.episode_store import EpisodeStore, is_held_out

INFO = EnvInfo(
    cameras={"top": (2, 3)},
    state_dim=1,
    action_low=(-1.0, -1.0),
    action_high=(1.0, 1.0),
    tasks=(TaskInfo(name="reach", instruction="reach it", max_steps=15),),
)
SHAPE = EpisodeShape.of(INFO, CHUNK)


def episode(number: int, length: int = 3) -> RecordedEpisode:
    """Return an episode: frames show its number in red and the chunk in green; actions are number + chunk / 10."""
    top = np.zeros((length + 1, 2, 3, 3), np.uint8)
    top[..., 0], top[..., 1] = number % 256, np.arange(length + 1)[:, None, None]
    actions = np.repeat(number + np.arange(length, dtype=np.float32) / 10, CHUNK * 2).reshape(length, CHUNK, 2)
    return RecordedEpisode(
        images={"top": top},
        state=np.arange(length + 1, dtype=np.float32)[:, None] + number,
        actions=actions,
        executed=np.ones((length, CHUNK), bool),
        outcomes=np.array([0] * (length - 1) + [2]),
        instruction=f"reach {number}",
        task="reach",
        reset_state=100 + number,
        number=number,
        seed=7,
    )


def make(folder: Path, capacity: int = 8, spare: int = 4, held_out: float = 0.0, count: int = 0) -> EpisodeStore:
    made = EpisodeStore(folder, SHAPE, capacity=capacity, spare=spare, held_out=held_out)
    made.add(episode(number) for number in range(count))
    return made


def shown(windows) -> list[list[int]]:
    return windows.images["top"][:, :, 0, 0, 1].tolist()


def test_windows_repeat_the_first_and_the_last_frame(tmp_path):
    made = make(tmp_path, count=2)
    ids = np.array([s.id for s in made.start_windows("any")])
    assert len(ids) == 6 and ids[:3].tolist() == [0, 1, 2] and ids[3] == SHAPE.longest
    windows = made.read_windows(ids[3:], history=3, rollout=2)
    assert shown(windows) == [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3], [0, 1, 2, 3, 3]]
    assert (windows.images["top"][..., 0] == 1).all(), "all of the second episode"
    assert windows.first.tolist() == [-2, -1, 0]
    assert windows.executed.any(-1).tolist() == [
        [False, False, True, True],
        [False, True, True, True],
        [True, True, True, False],
    ]
    assert windows.actions[:, :, 0, 0].round(1).tolist() == pytest.approx(
        np.array([[0, 0, 1, 1.1], [0, 1, 1.1, 1.2], [1, 1.1, 1.2, 0]]), abs=1e-6
    )
    assert windows.outcomes.tolist() == [[0, 0, 0, 0], [0, 0, 0, 2], [0, 0, 2, 0]]
    assert windows.state[:, :, 0].tolist() == [[1, 1, 1, 2, 3], [1, 1, 2, 3, 4], [1, 2, 3, 4, 4]]
    assert windows.states.tolist() == [101] * 3 and windows.seeds.tolist() == [7] * 3
    assert windows.instructions == ("reach 1",) * 3
    assert [s.id for s in made.start_windows("first")] == [0, SHAPE.longest]


def test_an_episode_shorter_than_the_one_before_in_its_slot(tmp_path):
    made = make(tmp_path, capacity=1, spare=0)
    made.add([episode(0, 4), episode(1, 2)])
    windows = made.read_windows(np.array([SHAPE.longest]), history=1, rollout=4)
    assert shown(windows) == [[0, 1, 2, 2, 2]] and (windows.images["top"][..., 0] == 1).all()
    assert windows.executed.any(-1).tolist() == [[True, True, False, False]]


def test_a_fifth_of_the_episodes_is_held_out_by_identity_alone(tmp_path):
    kept = [n for n in range(2000) if is_held_out(n % 50, n, 0.2)]
    assert 330 < len(kept) < 470
    assert [is_held_out(3, n, 0.2) for n in range(8)] == [is_held_out(3, n, 0.2) for n in range(8)]
    assert {is_held_out(3, n, 0.2) for n in range(40)} == {True, False}, "not by the state only"
    made = make(tmp_path, capacity=40, held_out=0.2, count=40)
    held = {s.id // SHAPE.longest for s in made.start_windows("any", held_out=True)}
    assert held == {n for n in range(40) if is_held_out(100 + n, n, 0.2)} != set()
    assert held.isdisjoint(s.id // SHAPE.longest for s in made.start_windows("any"))
    drawn = made.draw(300, history=1, rollout=1, seed=0, number=0)
    assert held.isdisjoint((drawn.states - 100).tolist())


def test_draws_are_keyed_and_favour_new_episodes(tmp_path):
    made = make(tmp_path, capacity=40, count=40)
    one, two = (made.draw(400, history=1, rollout=1, seed=3, number=5) for _ in range(2))
    assert np.array_equal(one.states, two.states) and np.array_equal(one.first, two.first)
    other = made.draw(400, history=1, rollout=1, seed=3, number=6)
    assert not np.array_equal(one.states, other.states)
    quarters = np.bincount((one.states - 100) // 10, minlength=4) / 400
    assert quarters == pytest.approx([0.1, 0.1, 0.1, 0.7], abs=0.07)


def test_the_oldest_are_forgotten_and_asking_for_them_is_an_error(tmp_path):
    made = make(tmp_path, capacity=3, count=5)
    assert len(made) == 3 and [s.id // SHAPE.longest for s in made.start_windows("first")] == [2, 3, 4]
    with pytest.raises(UserError, match=r"episode 1 is not in the recorder \(any more\)"):
        made.read_windows(np.array([SHAPE.longest]), history=1)


def test_slots_that_a_checkpoint_names_are_not_written_to(tmp_path):
    made = make(tmp_path, capacity=3, spare=2, count=3)
    index = json.loads(json.dumps(made.index.state()))
    made.index.saved()
    made.add([episode(3), episode(4)])
    with pytest.raises(UserError, match="has 2 slots for episodes between two checkpoints, and they are used up"):
        made.add([episode(5)])
    made.index.state()
    with pytest.raises(UserError, match="used up"):
        made.add([episode(5)])  # the checkpoint before is still the one that would be resumed
    again = make(tmp_path, capacity=3, spare=2)
    again.index.load_state(index)
    windows = again.read_windows(np.array([s.id for s in again.start_windows("first")]), history=1)
    assert windows.images["top"][:, 0, 0, 0, 0].tolist() == [0, 1, 2]
    made.index.saved()
    made.add([episode(5)])


def _trained(folder: Path, index: dict, until: int, killed_at: int | None = None) -> list[list[int]]:
    """Rounds of recording and drawing from a checkpoint on; a checkpoint every second round, in a file."""
    made, found = make(folder / "data", capacity=4, spare=4), []
    if index:
        made.index.load_state(index["recorder"])
    for number in range(index.get("round", 0), until):
        made.add([episode(2 * number), episode(2 * number + 1)])
        found.append(made.draw(6, history=2, rollout=1, seed=0, number=number).images["top"][:, :, 0, 0, 0].tolist())
        if killed_at == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if number % 2:
            text = json.dumps({"recorder": made.index.state(), "round": number + 1})
            (folder / "new").write_text(text)
            (folder / "new").replace(folder / "index.json")
            made.index.saved()
    return found


@pytest.mark.parametrize("killed_at", [0, 2, 5])
def test_a_killed_run_continues_with_the_same_windows(tmp_path, killed_at):
    broken = tmp_path / "broken"
    for folder in (tmp_path / "whole", broken):
        folder.mkdir()
    whole = _trained(tmp_path / "whole", {}, 8)
    child = multiprocessing.get_context("fork").Process(target=_trained, args=(broken, {}, 8, killed_at))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    index = json.loads((broken / "index.json").read_text()) if killed_at > 1 else {}
    rest = _trained(broken, index, 8)
    assert rest == whole[len(whole) - len(rest) :] and len(rest) == 8 - (killed_at - killed_at % 2)


def test_what_does_not_fit_is_refused_before_it_is_recorded(tmp_path):
    made = make(tmp_path)
    with pytest.raises(UserError, match=r"5 chunks"):
        made.add([episode(0, 5)])
    two = EpisodeStore(tmp_path / "other", attrs.evolve(SHAPE, state_dim=2), capacity=1, spare=0)
    with pytest.raises(
        UserError, match=r"image-top is nothing, not uint8 \[4, 2, 3, 3\]; state is float32 \[4, 1\], not"
    ):
        two.add([attrs.evolve(episode(0), images={})])
    with pytest.raises(UserError, match="recorded with other cameras, chunks or capacities; use another folder"):
        make(tmp_path, capacity=9)
    with pytest.raises(UserError, match="predicts frames, and this simulator has no cameras"):
        EpisodeShape.of(EnvInfo(cameras={}, state_dim=1, action_low=(0.0,), action_high=(1.0,), tasks=INFO.tasks), 4)
    assert len(made) == 0


@pytest.mark.parametrize("short", ["disk", "memory"])
def test_buffers_that_do_not_fit_are_refused(tmp_path, monkeypatch, short):
    room = {"disk": 1e12, "memory": 1e12} | {short: 1000.0}
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=room["disk"]))
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=room["memory"]))
    with pytest.raises(UserError, match=rf"12 episodes of up to 4 chunks take .* and the {short} of .* has 0.0 GB"):
        make(tmp_path)
    assert not list(tmp_path.glob("*.bin"))


def test_a_copy_of_a_run_by_links_does_not_change_the_original(tmp_path):
    original = make(tmp_path / "original", capacity=2, spare=1, count=3)
    original.flush()
    before = {file.name: file.read_bytes() for file in (tmp_path / "original").glob("*.bin")}
    (tmp_path / "copied").mkdir()
    for name in before:
        os.link(tmp_path / "original" / name, tmp_path / "copied" / name)
    copied = make(tmp_path / "copied", capacity=2, spare=1)
    copied.add(episode(number) for number in range(50, 53))
    copied.flush()
    assert {file.name: file.read_bytes() for file in (tmp_path / "original").glob("*.bin")} == before
    assert {file.name: file.read_bytes() for file in (tmp_path / "copied").glob("*.bin")} != before
