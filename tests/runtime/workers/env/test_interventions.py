"""Actions that a person chose, from the simulator to episodes, records and recordings."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from attrs import evolve
from helped_env import LENGTH, HelpedConfig, helped_envs

from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.events import robot_metrics
from vla_rl.core.types import ActionSource, ChunkResult
from vla_rl.runtime.messages.requests import EnvError, EpisodeRequest
from vla_rl.runtime.workers.env.episodes import Episodes
from vla_rl.testing import CheckFailed, check_env
from vla_rl.toolkit.data.recording import RecordSettings

CHUNK = 4
OWN = 0.25


def play(env, rows="steps"):
    """Play states 0 and 1, one after the other on each env; all of the policy's actions are 0.25. Return the finished
    tickets and the recordings, by number."""
    episodes = Episodes(env, name="helped", seed=7, chunk=CHUNK, record=RecordSettings(rows=rows))
    states = env.reset_states("train")
    request = episodes.step(None, [EpisodeRequest(state=states[i], number=i, recorded=True) for i in range(2)])
    finished = list(request.finished)
    while not request.done:
        request = episodes.step(np.full((len(request.positions), CHUNK, 2), OWN, np.float32))
        finished += request.finished
    return {ticket.number: ticket for ticket in finished}, {ticket.number: ticket.recording for ticket in finished}


def test_episodes_know_who_acted():
    """State 0 is even, so a person takes over for steps 3 and 4 of 6; no one does in state 1."""
    env = helped_envs(HelpedConfig(), EnvContext(num_envs=2, chunk=CHUNK))
    finished, _ = play(env)
    helped, alone = (finished[number].episodes[0] for number in (0, 1))
    assert (helped.steps, helped.interventions) == (LENGTH, 2) and (alone.steps, alone.interventions) == (LENGTH, 0)
    assert not helped.unaided_success and alone.unaided_success == alone.success_once
    record = finished[0].record
    assert record["source"].dtype == np.int8 and record["source"].shape == (2, CHUNK)
    assert record["source"].reshape(-1).tolist() == [0, 0, 0, ActionSource.PERSON, ActionSource.PERSON, 0, 0, 0]
    actions = record["executed_actions"].reshape(-1, 2)
    assert np.abs(actions[3:5]).tolist() == [[0.75, 0.0]] * 2, "the person's"
    assert (actions[[0, 1, 2, 5]] == OWN).all(), "the policy's"
    assert not finished[1].record["source"].any()


def test_an_executed_action_of_another_shape_is_named():
    env = helped_envs(HelpedConfig(dimensions=3), EnvContext(num_envs=2, chunk=CHUNK))
    message = r"Helped.step \(.*helped_env.py:\d+\) returned an executed_action of shape \[3\]; .* has \[2\]"
    with pytest.raises(UserError, match=message):
        play(env)
    env.close()


@pytest.mark.parametrize("rows", ["steps", "chunks"])
def test_recordings_hold_the_executed_actions(rows):
    env = helped_envs(HelpedConfig(), EnvContext(num_envs=2, chunk=CHUNK))
    finished, recordings = play(env, rows)
    expected = finished[0].record["source"].reshape(-1) != ActionSource.POLICY
    actions = finished[0].record["executed_actions"].reshape(-1, 2)
    recording = recordings[0]
    if rows == "steps":
        assert recording.interventions.tolist() == expected[:LENGTH].tolist()
        assert np.array_equal(recording.actions, actions[:LENGTH])
    else:
        assert recording.interventions.reshape(-1).tolist() == expected.tolist()
        executed = chain(*(chunk[:n] for chunk, n in zip(recording.actions, recording.executed, strict=True)))
        assert np.array_equal(np.stack(list(executed)), actions[:LENGTH])
    assert not recordings[1].interventions.any()


@pytest.mark.parametrize("rows", ["steps", "chunks"])
def test_late_actions_of_episodes_in_real_time_are_counted(rows):
    """The fifth step is late: the first one of the second chunk."""
    finished, _ = play(helped_envs(HelpedConfig(late=4), EnvContext(num_envs=1, chunk=CHUNK)), rows)
    assert [finished[number].episodes[0].late_actions for number in (0, 1)] == [1, 1]
    assert robot_metrics("env", [finished[0].episodes[0]])["env/late_actions"] == pytest.approx(1 / LENGTH)
    untimed, _ = play(helped_envs(HelpedConfig(), EnvContext(num_envs=1, chunk=CHUNK)))
    assert untimed[0].episodes[0].late_actions is None
    assert "env/late_actions" not in robot_metrics("env", untimed[0].episodes)


def test_no_one_can_take_over_where_info_does_not_say_so():
    """Without takeovers there is no field for them, and a simulator that reports one breaks the contract."""
    env = helped_envs(HelpedConfig(first=LENGTH, announced=False), EnvContext(num_envs=2, chunk=CHUNK))
    finished, recordings = play(env)
    assert finished[0].episodes[0].interventions is None and "source" not in finished[0].record
    assert recordings[0].interventions is None
    with pytest.raises(UserError, match=r"reports a takeover, and `EnvInfo.takeovers` is false"):
        play(helped_envs(HelpedConfig(announced=False), EnvContext(num_envs=2, chunk=CHUNK)))


BREACHES = {
    "source is None": ({"source": None}, "source is None"),
    "another type": ({"source": np.zeros((2, CHUNK), np.int64)}, "source is int64, expected int8"),
    "no such source": ({"source": np.full((2, CHUNK), 7, np.int8)}, "source 7 is none of ActionSource"),
    "no actions": ({"executed_actions": None}, "executed_actions is None"),
    "nan": ({"executed_actions": np.full((2, CHUNK, 2), np.nan, np.float32)}, "that is not finite"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_simulator_that_reports_takeovers_wrongly_is_named(breach):
    changes, message = BREACHES[breach]
    env = helped_envs(HelpedConfig(first=0), EnvContext(num_envs=2, chunk=CHUNK))
    step = env.chunk_step

    def broken(actions, active, stop_at_end) -> ChunkResult:
        return evolve(step(actions, active, stop_at_end), **changes)

    env.chunk_step = broken  # type: ignore[method-assign]
    with pytest.raises(EnvError, match=message):
        play(env, "chunks")


def test_the_conformance_tests_look_at_takeovers():
    check_env(helped_envs(HelpedConfig(), EnvContext(num_envs=2, chunk=CHUNK)), num_envs=2, chunk=CHUNK, seconds=1)
    env = helped_envs(HelpedConfig(), EnvContext(num_envs=2, chunk=CHUNK))
    step = env.chunk_step

    def without_source(actions, active, stop_at_end) -> ChunkResult:
        return evolve(step(actions, active, stop_at_end), source=None)

    env.chunk_step = without_source  # type: ignore[method-assign]
    with pytest.raises(CheckFailed, match="leave EnvInfo.takeovers out"):
        check_env(env, num_envs=2, chunk=CHUNK, seconds=1)
