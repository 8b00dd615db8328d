from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_rl.core.randomness import Noise
from vla_rl.testing import LinearModel, ScriptedEnv
from vla_rl.testing.scripted import SimulatorFault, read_stamp


def step(env: ScriptedEnv, chunk: int, stop_at_end: bool = True, push: float = 0.0):
    actions = np.full((env.num_envs, chunk, 2), push, np.float32)
    return env.chunk_step(actions, np.ones(env.num_envs, bool), stop_at_end)


def test_episodes_end_where_the_script_says() -> None:
    ends = {0: (2, "success"), 1: (3, "truncated"), (2, 0): (1, "failure")}
    env = ScriptedEnv(4, ends)
    env_ids = np.arange(4)
    env.reset(env_ids, np.array([0, 1, 2, 3]), env_ids)
    result = step(env, 4)
    assert result.terminated.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert result.truncated.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert result.executed.sum(1).tolist() == [2, 3, 1, 4]
    assert result.success.tolist() == [True, False, False, False]
    assert result.rewards.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    env.reset(np.array([2]), np.array([2]), np.array([9]))
    assert not step(env, 1).terminated[2]  # (env 2, episode 0) was another episode


@pytest.mark.parametrize(("holds", "after"), [(True, [0, 1, 1, 1]), (False, [0, 1, 0, 0])])
def test_an_env_that_runs_on_keeps_or_loses_its_success(holds: bool, after: list[int]) -> None:
    env = ScriptedEnv(1, lambda state: (2, "success"), holds=holds)
    env.reset(np.array([0]), np.array([5]), np.array([0]))
    result = step(env, 4, stop_at_end=False)
    assert result.executed.all()
    assert result.succeeded.tolist() == [after]
    assert result.success.tolist() == [bool(after[-1])]
    assert result.terminated.sum() == 1


def lengths(env: ScriptedEnv, states: np.ndarray) -> np.ndarray:
    env_ids = np.arange(env.num_envs)
    env.reset(env_ids, states, env_ids)
    return step(env, 300).executed.sum(1)


def test_lengths_vary_over_states_by_the_given_spread() -> None:
    env, states = ScriptedEnv(1000, length=48, length_sigma=0.3), np.arange(1000)
    found = lengths(env, states)
    assert abs(found.mean() - 48) < 2 and abs(np.log(found).std() - 0.3) < 0.03
    assert np.array_equal(lengths(env, states[::-1]), found[::-1])
    assert set(lengths(ScriptedEnv(1000, length=48), states)) == {48}


def test_the_stamp_tells_env_episode_step_and_state() -> None:
    env = ScriptedEnv(3, first_env=100)
    env.reset(np.arange(3), np.array([300, 1, 2]), np.zeros(3, np.int64))
    env.reset(np.array([2, 0]), np.array([7, 300]), np.array([11, 12]))
    said = read_stamp(step(env, 3).obs)
    assert said.env.tolist() == [100, 101, 102]
    assert said.episode.tolist() == [1, 0, 1]
    assert said.step.tolist() == [3, 3, 3]
    assert said.state.tolist() == [300, 1, 7]
    assert env.seeds.tolist() == [12, 0, 11]


def test_the_default_task_is_won_by_the_sign_of_the_state() -> None:
    env = ScriptedEnv(4, length=2)
    obs = env.reset(np.arange(4), np.arange(4), np.arange(4))
    result = step(env, 2, push=0.5)
    assert result.success.tolist() == (obs.state[:, 0] > 0).tolist()
    assert sorted(set(obs.state[:, 0])) == [-1.0, 1.0]


def test_a_linear_policy_learns_it_in_a_few_updates() -> None:
    env = ScriptedEnv(64, chunk=4)
    model = LinearModel(env.info, 4)
    env_ids = np.arange(64)
    optimiser = torch.optim.Adam(model.module.parameters(), lr=0.1)
    rates = []
    for update in range(30):
        obs = env.reset(env_ids, env_ids, env_ids)
        chunk = model.sample_chunk(obs, Noise(0, "test", env_ids, [update] * 64, [0] * 64), False)
        won = torch.as_tensor(env.chunk_step(chunk.actions, env_ids >= 0, True).success).float()
        rates.append(float(won.mean()))
        log_probs = model.chunk_log_probs(obs, chunk).log_probs[..., 0].sum(-1)
        optimiser.zero_grad()
        (-(log_probs * (won - won.mean())).mean()).backward()
        optimiser.step()
    assert np.mean(rates[:3]) < 0.7
    assert np.mean(rates[-3:]) > 0.9


def test_faults_begin_when_told() -> None:
    env = ScriptedEnv(2, fault="raise", fault_at=1)
    env.reset(np.arange(2), np.arange(2), np.arange(2))
    step(env, 1)
    with pytest.raises(SimulatorFault):
        step(env, 1)
    assert np.isnan(step(ScriptedEnv(2, fault="nan"), 1).obs.state).all()
    assert step(ScriptedEnv(2, fault="shape"), 1).obs.images["main"].shape == (2, 7, 8, 3)


@pytest.mark.parametrize("bins", [1, 257])
def test_bins_out_of_range_are_refused(bins: int) -> None:
    with pytest.raises(ValueError, match="bins is"):
        LinearModel(ScriptedEnv(1).info, 1, bins=bins)
