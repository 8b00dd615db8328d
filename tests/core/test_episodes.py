"""Episodes against a scripted simulator that ends at every possible place in a chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.core.episodes import EnvError, Episodes, Start
from vla_rl.core.randomness import derived_seed
from vla_rl.core.reset_states import draw_state
from vla_rl.testing.scripted import ScriptedEnv, seen

OUTCOMES = ("success", "failure", "truncated", None)


def play(env, chunk, *, chunk_steps=None, actions=None, **options):
    """One round with state i in row i (then i + N, ...); -> the Episodes and every request."""
    episodes = Episodes(env, name="scripted", seed=7, chunk=chunk, **options)
    states = env.reset_states("train")

    def start(row, index):
        return Start(state=states[(row + index * env.num_envs) % len(states)], row=row, episode=index)

    request = episodes.begin([start(r, 0) for r in range(env.num_envs)], chunk_steps, start)
    requests = [request]
    while not request.done:
        act = np.zeros((len(request.positions), chunk, 2), np.float32) if actions is None else actions
        request = episodes.step(act)
        requests.append(request)
    return episodes, requests


@settings(max_examples=80, deadline=None)
@given(
    chunk=st.integers(1, 5),
    limit=st.integers(1, 11),
    ends=st.lists(st.tuples(st.integers(1, 12), st.sampled_from(OUTCOMES)), min_size=3, max_size=3),
)
def test_valid_mask_mode_counts_up_to_and_including_the_end(chunk, limit, ends):
    script = {i: (step, outcome) for i, (step, outcome) in enumerate(ends) if outcome is not None}
    env = ScriptedEnv(3, script, max_steps=limit, chunk=chunk)
    episodes, _ = play(env, chunk, auto_reset="off")
    light = episodes.light()
    lengths, terminated, truncated, success = [], [], [], []
    for row in range(3):
        step, outcome = script.get(row, (10**6, None))
        inside = step <= limit
        lengths.append(min(step, limit))
        terminated.append(inside and outcome in ("success", "failure"))
        truncated.append(not inside or outcome == "truncated")
        success.append(inside and outcome == "success")

    valid = light["valid"].transpose(1, 0, 2).reshape(3, -1)
    assert valid.sum(1).tolist() == lengths
    assert all(mask[:n].all() for mask, n in zip(valid, lengths, strict=True))  # one stretch from the start
    assert light["terminated"].any((0, 2)).tolist() == terminated
    assert light["truncated"].any((0, 2)).tolist() == truncated
    assert (light["terminated"] | light["truncated"]).sum((0, 2)).tolist() == [1, 1, 1]  # the end is marked once
    assert light["rewards"].sum((0, 2)).tolist() == [float(s) for s in success]
    by_row = {episode.row: episode for _, episode in episodes.finished}
    assert [by_row[r].success_once for r in range(3)] == success
    assert [by_row[r].steps for r in range(3)] == lengths
    assert [by_row[r].truncated for r in range(3)] == truncated


@settings(max_examples=60, deadline=None)
@given(
    chunk=st.integers(1, 4),
    mode=st.sampled_from(["immediate", "deferred"]),
    ends=st.lists(st.tuples(st.integers(1, 6), st.sampled_from(OUTCOMES[:3])), min_size=6, max_size=6),
)
def test_auto_reset_starts_the_next_episode_with_the_next_chunk(chunk, mode, ends):
    script = dict(enumerate(ends))
    env = ScriptedEnv(2, script, max_steps=6, chunk=chunk, num_states=6)
    episodes, requests = play(env, chunk, auto_reset=mode, chunk_steps=5)
    light = episodes.light()
    assert light["valid"].shape == (5, 2, chunk)
    for row in range(2):
        expected, index, left = [], 0, ends[row][0]
        for _ in range(5):
            valid = min(left, chunk)
            left -= valid
            expected.append(valid)
            if left == 0:
                index += 1
                left = ends[(row + 2 * index) % 6][0]
        assert light["valid"][:, row].sum(-1).tolist() == expected
        assert (light["valid"][:, row].argmin(-1) * ~light["valid"][:, row].all(-1) == np.array(expected) % chunk).all()
    final = requests[-1]
    assert final.done and final.obs is None
    for request in requests[1:-1]:  # a row that ended shows its new episode, at step 0
        shown = seen(request.obs)
        for position, row in enumerate(request.positions):
            assert shown.row[position] == row
            assert shown.step[position] == request.chunks[position] * chunk or mode == "immediate"
            assert (shown.step[position] == 0) == (request.chunks[position] == 0)


def test_immediate_drops_the_rest_of_the_chunk_and_deferred_executes_it():
    executed = {}
    for mode in ("immediate", "deferred"):
        env = ScriptedEnv(1, {0: (2, "success")}, max_steps=8, chunk=4)
        episodes, _ = play(env, 4, auto_reset=mode, chunk_steps=1)
        executed[mode] = episodes.env_steps
        assert episodes.light()["valid"].tolist() == [[[True, True, False, False]]]
        assert episodes.light()["rewards"].tolist() == [[[0.0, 1.0, 0.0, 0.0]]]
    assert executed == {"immediate": 2, "deferred": 4}


def test_fixed_length_ignores_terminations_and_counts_every_step():
    env = ScriptedEnv(1, {0: (2, "success")}, max_steps=6, chunk=4, holds=True)
    episodes, _ = play(env, 4, auto_reset="immediate", ignore_terminations=True, chunk_steps=2)
    light = episodes.light()
    assert light["valid"].reshape(-1).tolist() == [True] * 6 + [False] * 2  # the limit of 6 cuts the second chunk
    assert not light["terminated"].any()
    assert light["truncated"].reshape(-1).tolist() == [False] * 5 + [True] + [False] * 2
    episode = episodes.finished[0][1]
    assert (episode.success_once, episode.success_at_end, episode.steps) == (True, True, 6)


def test_success_once_and_at_end_differ_when_success_is_lost():
    env = ScriptedEnv(1, {0: (2, "success")}, max_steps=8, chunk=4, holds=False)
    episodes, _ = play(env, 4, auto_reset="immediate", ignore_terminations=True, chunk_steps=2)
    episode = episodes.finished[0][1]
    assert (episode.success_once, episode.success_at_end) == (True, False)


def test_final_observation_is_the_one_before_the_reset():
    env = ScriptedEnv(2, {0: (3, "truncated"), 1: (5, "success")}, max_steps=8, chunk=4)
    _, requests = play(env, 4, auto_reset="immediate", chunk_steps=3, bootstrap=True)
    first = requests[1]
    assert first.final_positions.tolist() == [0]
    shown = seen(first.final)
    assert (shown.row[0], shown.episode[0], shown.step[0]) == (0, 0, 3)
    place = first.positions.tolist().index(0)
    assert (seen(first.obs).episode[place], seen(first.obs).step[place]) == (1, 0)
    second = requests[2]  # row 1 ended by success: nothing to bootstrap
    assert 1 not in second.final_positions.tolist()
    assert requests[3].done and 1 in requests[3].final_positions.tolist()  # cut by the end of the rollout


def test_no_final_observation_without_a_critic():
    env = ScriptedEnv(1, {0: (1, "truncated")}, max_steps=4, chunk=2)
    _, requests = play(env, 2, auto_reset="off")
    assert all(r.final is None for r in requests)


def test_relative_rewards_pay_a_lasting_success_once():
    env = ScriptedEnv(1, {0: (100, None)}, max_steps=4, chunk=2, step_reward=1.0)
    episodes, _ = play(env, 2, reward="relative", reward_coef=3.0)
    assert episodes.light()["rewards"].reshape(-1).tolist() == [3.0, 0.0, 0.0, 0.0]


def test_seeds_depend_on_run_seed_row_and_episode_only():
    env = ScriptedEnv(2, {}, max_steps=2, chunk=1)
    play(env, 1)
    assert env.seeds.tolist() == [derived_seed(7, "episode", 0, 0), derived_seed(7, "episode", 1, 0)]
    assert len({derived_seed(s, "episode", r, e) for s in range(3) for r in range(3) for e in range(3)}) == 27


def test_states_are_drawn_without_repetition_until_the_split_is_used_up():
    states = ScriptedEnv(1, num_states=10).reset_states("train")
    first = [draw_state(states, 3, 5, i).id for i in range(10)]
    assert sorted(first) == list(range(10))
    assert first != [draw_state(states, 3, 6, i).id for i in range(10)]
    assert first == [draw_state(states, 3, 5, i).id for i in range(10)]
    assert sorted(draw_state(states, 3, 5, i).id for i in range(10, 20)) == list(range(10))


def test_idle_rows_are_left_alone():
    env = ScriptedEnv(2, {}, max_steps=2, chunk=2)
    episodes = Episodes(env, name="scripted", seed=0, chunk=2)
    state = env.reset_states("eval")[0]
    request = episodes.begin([None, Start(state=state, row=9, episode=1)], None, None)
    assert request.positions.tolist() == [1] and request.rows.tolist() == [9]
    request = episodes.step(np.zeros((1, 2, 2), np.float32))
    assert request.done and not episodes.light()["valid"][:, 0].any()
    assert [(e.row, e.episode) for _, e in episodes.finished] == [(9, 1)]


@pytest.mark.parametrize(
    ("fault", "message"), [("nan", "state that is not finite in row 0"), ("shape", r"shape .* expected \(1, 8, 8, 3\)")]
)
def test_a_broken_observation_is_named(fault, message):
    env = ScriptedEnv(1, {}, max_steps=4, chunk=2, fault=fault)
    with pytest.raises(EnvError, match=message):
        play(env, 2)


def test_an_action_out_of_bounds_is_refused_with_its_place():
    env = ScriptedEnv(2, {}, max_steps=4, chunk=2)
    actions = np.zeros((2, 2, 2), np.float32)
    actions[1, 0, 1] = 1.7
    with pytest.raises(EnvError, match=r"1\.7 in dimension 1 \(row 1, action 0.*bounds \[-1, 1\] of env 'scripted'"):
        play(env, 2, actions=actions)


def test_a_nan_action_is_refused():
    with pytest.raises(EnvError, match="nan in dimension 0"):
        play(ScriptedEnv(1, {}, max_steps=4, chunk=2), 2, actions=np.full((1, 2, 2), np.nan, np.float32))


def test_a_chunk_of_the_wrong_size_is_refused():
    with pytest.raises(EnvError, match=r"shape \(1, 3, 2\), expected \(1, 2, 2\)"):
        play(ScriptedEnv(1, {}, max_steps=4, chunk=2), 2, actions=np.zeros((1, 3, 2), np.float32))


def test_a_lane_without_episodes_asks_for_nothing():
    class Picky(ScriptedEnv):
        def reset(self, rows, state_ids, seed):
            assert len(rows), "a simulator is never asked to reset no rows"
            return super().reset(rows, state_ids, seed)

    episodes = Episodes(Picky(2, chunk=2), name="scripted", seed=7, chunk=2)
    assert episodes.begin([None, None], None, None).done
    assert episodes.step(np.zeros((0, 2, 2), np.float32)).done
    assert episodes.light() == {}
