"""The buffer of transitions: frames kept once, discounts, bounded files, exact resume."""

from __future__ import annotations

import shutil

import attrs
import numpy as np
import pytest

from vla_rl.core.errors import UserError
from vla_rl.core.trainers import Transitions
from vla_rl.core.types import Observation
from vla_rl.testing import synthetic
from vla_rl.toolkit.trainers.replay import TransitionBuffer

CHUNK = 3
INFO = synthetic.env_info(cameras=2, pixels=8)


def frames_of(count, seed):
    return synthetic.observation(INFO, count, seed=seed)


def transitions_of(count, seed=0):
    """An episode: `count` transitions in a row, of which the last one ends the task in its second action."""
    draws = np.random.default_rng(seed)
    valid = np.ones((count, CHUNK), bool)
    valid[-1, 2:] = False
    return Transitions(
        frames=frames_of(count + 1, seed),
        first=np.arange(count),
        following=np.arange(1, count + 1),
        actions=draws.random((count, CHUNK, INFO.action_dim)).astype(np.float32),
        rewards=draws.random((count, CHUNK)).astype(np.float32) * valid,
        valid=valid,
        terminated=np.arange(count) == count - 1,
    )


def buffer_in(folder, capacity=100, file_bytes=4000, discount=0.9):
    return TransitionBuffer(folder, INFO, CHUNK, capacity, discount, file_bytes)


def equal(one, other):
    same = [np.array_equal(getattr(one, name), getattr(other, name)) for name in ("actions", "rewards", "bootstrap")]
    return all(same) and same_observations(one.obs, other.obs) and same_observations(one.following, other.following)


def same_observations(one, other):
    same = [np.array_equal(one.images[name], other.images[name]) for name in INFO.cameras]
    return all(same) and one.instructions == other.instructions and np.array_equal(one.state, other.state)


def test_transitions_come_back_with_their_observations(tmp_path):
    buffer = buffer_in(tmp_path)
    episodes = [transitions_of(4, 1), transitions_of(2, 2)]
    for episode in episodes:
        buffer.add(episode)
    assert len(buffer) == buffer.transition_count == 6
    indices = np.array([5, 0, 3, 0])
    batch = buffer.read_transitions(indices)
    for row, (episode, at) in enumerate([(1, 1), (0, 0), (0, 3), (0, 0)]):
        given = episodes[episode]
        obs = given.frames.take(np.array([at, at + 1]))
        got = Observation.concat([batch.obs.take(np.array([row])), batch.following.take(np.array([row]))])
        assert same_observations(got, obs)
        assert np.array_equal(batch.actions[row], given.actions[at])
        rewards = sum(0.9**i * given.rewards[at, i] for i in range(CHUNK))
        assert batch.rewards[row] == pytest.approx(rewards, rel=1e-6)
        assert batch.bootstrap[row] == pytest.approx(0.0 if given.terminated[at] else 0.9**CHUNK)


def test_a_truncated_chunk_is_discounted_by_its_valid_actions(tmp_path):
    buffer = buffer_in(tmp_path)
    buffer.add(attrs.evolve(transitions_of(3), terminated=np.zeros(3, bool)))
    assert buffer.read_transitions(np.arange(3)).bootstrap == pytest.approx([0.9**3, 0.9**3, 0.9**2])


def test_a_frame_is_kept_once(tmp_path):
    buffer = buffer_in(tmp_path)
    buffer.add(transitions_of(10))
    frame = 2 * 8 * 8 * 3
    stored = sum(path.stat().st_size for path in (tmp_path / "frames").iterdir())
    assert 11 * frame < stored < 11 * (frame + 64)


def test_steps_of_episodes_are_kept(tmp_path):
    buffer = buffer_in(tmp_path)
    episode = transitions_of(3)
    buffer.add(attrs.evolve(episode, frames=attrs.evolve(episode.frames, steps=np.array([0, 3, 6, 8]))))
    assert buffer.read_transitions(np.array([2])).following.steps.tolist() == [8]
    other = buffer_in(tmp_path / "other")
    other.add(episode)
    assert other.read_transitions(np.array([2])).following.steps is None


def test_old_transitions_are_forgotten_and_files_stay_bounded(tmp_path):
    buffer = buffer_in(tmp_path, capacity=20)
    sizes = []
    for seed in range(30):
        buffer.add(transitions_of(5, seed))
        sizes.append(sum(path.stat().st_size for path in tmp_path.rglob("*.bin")))
    assert len(buffer) == 20
    assert buffer.oldest_transition == 130
    frames, transitions = (log.dtype.itemsize for log in (buffer._frames, buffer._transitions))
    window = (20 + 5) * (frames * 6 / 5 + transitions)  # with the episode that is added, of 6 frames and 5 transitions
    assert window / 2 < max(sizes) <= window + 2 * 4000  # and one file of each kind that is needed in part
    assert equal(buffer.read_transitions(np.arange(145, 150)), _alone(tmp_path / "alone", transitions_of(5, 29)))


def _alone(folder, episode):
    buffer = buffer_in(folder)
    buffer.add(episode)
    return buffer.read_transitions(np.arange(len(episode)))


def test_a_resumed_buffer_equals_an_uninterrupted_one(tmp_path):
    through = buffer_in(tmp_path / "through", capacity=12)
    killed = buffer_in(tmp_path / "killed", capacity=12)
    for seed in range(6):
        through.add(transitions_of(5, seed))
        killed.add(transitions_of(5, seed))
    state = killed.state()
    for seed in (50, 51, 52, 53):  # more than the capacity, after the checkpoint
        killed.add(transitions_of(5, seed))
    resumed = buffer_in(tmp_path / "killed", capacity=12)
    resumed.load(state)
    for buffer in (through, resumed):
        buffer.add(transitions_of(5, 6))
    assert (
        (resumed.oldest_transition, resumed.transition_count)
        == (through.oldest_transition, through.transition_count)
        == (23, 35)
    )
    indices = np.arange(23, 35)
    assert equal(through.read_transitions(indices), resumed.read_transitions(indices))


def test_the_last_but_one_checkpoint_can_be_resumed(tmp_path):
    buffer = buffer_in(tmp_path, capacity=10)
    states = []
    for seed in range(12):
        buffer.add(transitions_of(5, seed))
        expected = buffer.read_transitions(np.arange(buffer.oldest_transition, buffer.transition_count))
        states.append((buffer.state(), expected))
    for state, expected in reversed(states[-2:]):
        copy = tmp_path.parent / f"{tmp_path.name}-{state['transitions']}"
        shutil.copytree(tmp_path, copy)
        resumed = buffer_in(copy, capacity=10)
        resumed.load(state)
        assert equal(resumed.read_transitions(np.arange(resumed.oldest_transition, resumed.transition_count)), expected)
    old = buffer_in(tmp_path, capacity=10)
    with pytest.raises(UserError, match="the checkpoint needs the replay buffer's records"):
        old.load(states[3][0])


def test_a_full_disk_leaves_the_buffer_as_it_was(tmp_path, monkeypatch):
    buffer = buffer_in(tmp_path)
    buffer.add(transitions_of(4, 1))
    expected = buffer.read_transitions(np.arange(4))

    def full(records):
        raise UserError("the replay buffer could not be written")

    monkeypatch.setattr(buffer._transitions, "append", full)
    with pytest.raises(UserError, match="could not be written"):
        buffer.add(transitions_of(4, 2))
    monkeypatch.undo()
    assert buffer.transition_count == 4
    buffer.add(transitions_of(4, 3))
    assert equal(buffer.read_transitions(np.arange(4)), expected)
    assert equal(buffer.read_transitions(np.arange(4, 8)), _alone(tmp_path / "alone", transitions_of(4, 3)))
