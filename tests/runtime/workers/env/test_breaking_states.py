"""A reset state that always breaks the simulator costs its own episodes, and no other's."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import fragile
import numpy as np
import pytest
from fragile import FragileConfig
from scripted_runs import read_metrics, scripted_spec
from typer.testing import CliRunner

from vla_rl.cli.main import app
from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import StopAndSave, UserError
from vla_rl.core.reset_states import draw_state
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import Observation, ResetState
from vla_rl.runtime.driver.collecting.rollouts import EnvStreams
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.start import evaluate, run
from vla_rl.runtime.workers.env.recording import FrameRecorder
from vla_rl.toolkit.envs.settings import Processes

PLUGINS = ["vla_rl.testing.scripted", str(Path(fragile.__file__))]
BACKENDS = ["local", pytest.param("ray", marks=pytest.mark.ray)]
BAD = 35
"""A state of the eval split, 32 to 47."""
TRAINING = [ResetState(id=i, task="sign") for i in range(32)]


def breaking_spec(fault="raise", states=(BAD,), **changes):
    spec = {
        "plugins": PLUGINS,
        "env": {"type": "fragile", "num_envs": 4, "fault": fault, "states": list(states)},
        "rollout": {"chunk": 2, "episodes": 32, "group_size": 2},
        "algorithm": {"type": "grpo"},
        "train": {"steps": 2, "global_batch": 8},
    }
    for name, value in changes.items():
        spec[name] = {**spec.get(name, {}), **value} if isinstance(value, dict) else value
    return scripted_spec(**spec)


@pytest.fixture(scope="module")
def calm():
    """Result of the evaluation in which nothing breaks."""
    return evaluate(parse_spec(breaking_spec("none")))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", ["abort", "raise", "reset"])
def test_an_evaluation_has_the_result_of_all_other_states(calm, fault, backend):
    faults: list[str] = []
    spec = parse_spec(breaking_spec(fault, runtime={"backend": backend}))
    result = evaluate(spec, on_fault=faults.append)
    assert result["missing"] == [{"task": "sign", "state": BAD, "episode": 0}]
    assert result["success"]["n"] == result["tasks"]["sign"]["n"] == 15
    assert result["episodes"] == [episode for episode in calm["episodes"] if episode["state"] != BAD]
    assert result["success"]["rate"] == np.mean([episode["success_once"] for episode in result["episodes"]])
    assert result["repeats"] == [result["success"]["rate"]]
    assert all(text.startswith(f"task 'sign', state {BAD}: env ") for text in faults)
    assert "env.exclude_states" not in faults[0]
    assert f"state {BAD} broke envs 2 times; to leave it out: 'env.exclude_states=[{BAD}]'" in faults[1]
    assert "missing" not in calm


def test_states_that_are_solved_at_the_start_are_counted_and_told(calm, tmp_path, caplog):
    """Once each, however often a run evaluates."""
    told = "of 16 episodes of the evaluation succeeded with their first action: their initial states"
    result = evaluate(parse_spec(breaking_spec("solved", states=(BAD, 40))))
    assert result["immediate_successes"] == 2 and f"2 {told} ({BAD}, 40) may be solved" in caplog.text
    assert "immediate_successes" not in calm
    caplog.clear()
    results = run(parse_spec(breaking_spec("solved", eval={"every": 1})), tmp_path, False)
    assert results["immediate_successes"] == 1 and caplog.text.count(f"1 {told}") == 1


def test_other_repeats_of_a_state_that_breaks_are_not_tried():
    result = evaluate(parse_spec(breaking_spec(env={"num_envs": 2}, eval={"repeats": 3})))
    assert [episode["episode"] for episode in result["missing"]] == [0, 1, 2]
    assert (result["faults"], result["success"]["n"], len(result["repeats"])) == (2, 45, 3)


@pytest.mark.parametrize("fault", ["abort", "stop"])
def test_envs_that_share_a_process_take_no_blame(fault):
    """The state of the env that ended the process, or hangs, is named, and not that of the first env there."""
    processes = {"envs_per_process": 4, "deadline_s": 0.5}
    result = evaluate(parse_spec(breaking_spec(fault, env={"processes": processes})))
    assert [episode["state"] for episode in result["missing"]] == [BAD]
    assert result["success"]["n"] == 15


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluations_of_a_run_do_without_the_state(tmp_path, backend):
    spec = breaking_spec("abort", eval={"every": 1}, runtime={"backend": backend, "max_faults": 2})
    results = run(parse_spec(spec), tmp_path, False)
    assert results["faults"] == 2, "later evaluations do not try the state again"
    saved = json.loads((tmp_path / "results.json").read_text())
    for suffix in ("", "_before"):
        assert saved[f"missing{suffix}"] == [{"task": "sign", "state": BAD, "episode": 0}]
        assert saved[f"success{suffix}"]["n"] == 15
    assert len([line for line in read_metrics(tmp_path) if "eval/success_rate" in line]) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_state_that_always_breaks_is_named_and_can_be_left_out(tmp_path, backend):
    """The run is saved after its first step, and resumed without the state."""
    groups_per_step = 16
    bad = draw_state(TRAINING, 3, groups_per_step + 4).id
    settings = {"runtime": {"backend": backend, "max_faults": 3}, "train": {"steps": 3}, "eval": {"before": False}}
    with pytest.raises(StopAndSave) as caught:
        run(parse_spec(breaking_spec("abort", [bad], **settings)), tmp_path, False)
    message = str(caught.value)
    assert "broke 4 times (runtime.max_faults: 3)" in message and f"task 'sign', state {bad}: env " in message
    assert f"to leave it out: 'env.exclude_states=[{bad}]'" in message
    assert "stopped after step 1" in str(caught.value.__notes__)
    resumed = run(parse_spec(breaking_spec("abort", [bad], env={"exclude_states": [bad]}, **settings)), tmp_path, True)
    assert resumed["steps"] == 3


def test_demonstrations_do_without_a_state_that_breaks(tmp_path):
    warm = {"episodes": 16, "epochs": 1, "lr": 0.01}
    states = list(range(4, 32, 4))
    spec = breaking_spec("raise", states=states, bc_warmup=warm, train={"steps": 0}, runtime={"max_faults": 100})
    run(parse_spec(spec), tmp_path, False)
    assert read_metrics(tmp_path)[0]["bc_warmup/samples"] >= 2 * warm["episodes"]


def test_excluded_states_start_no_episode(calm):
    result = evaluate(parse_spec(breaking_spec("abort", env={"exclude_states": [BAD]})))
    assert (result["faults"], result["success"]["n"]) == (0, 15) and "missing" not in result
    first = evaluate(parse_spec(breaking_spec("none", eval={"episodes_per_task": 2}, env={"exclude_states": [32]})))
    assert [episode["state"] for episode in first["episodes"]] == [33, 34]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([99], r"env.exclude_states: env 'fragile' has no state 99; its states: 0 to 31 \(train\), 32 to 47 \(eval\)"),
        (range(32, 48), "env.exclude_states: lists all 16 states of the eval split"),
        (range(32), "env.exclude_states: lists all 32 states of the train split"),
    ],
)
def test_what_cannot_be_excluded(states, message):
    with pytest.raises(UserError, match=message):
        evaluate(parse_spec(breaking_spec("none", env={"exclude_states": list(states)})))


def test_an_evaluation_in_which_every_state_breaks_has_no_result():
    spec = breaking_spec("raise", states=range(32, 48), runtime={"max_faults": 100})
    with pytest.raises(UserError, match="no result: env 'fragile' broke in every episode"):
        evaluate(parse_spec(spec))


def test_the_command_lists_what_is_missing(tmp_path, caplog):
    file = tmp_path / "spec.yaml"
    parse_spec(breaking_spec("abort")).dump(file)
    with caplog.at_level(logging.WARNING):
        printed = CliRunner().invoke(app, ["eval", str(file), "--output", str(tmp_path / "result.json")]).stdout
    assert "n=15" in printed
    assert f"no result, as envs broke, for 1 of 16 episodes: state {BAD} of task 'sign'" in printed
    assert json.loads((tmp_path / "result.json").read_text())["missing"][0]["state"] == BAD
    assert caplog.text.count(f"fault: task 'sign', state {BAD}: env ") == 2


def test_a_state_that_cannot_be_reset_leaves_the_other_envs_alone():
    config = FragileConfig(fault="reset", states=(BAD,), processes=Processes(envs_per_process=1))
    env = fragile.build(config, EnvContext(num_envs=2, chunk=1))
    obs = env.reset(np.arange(2), np.array([33, BAD]), np.arange(2))
    assert len(obs) == 2 and {env_id: len(texts) for env_id, texts in env.faults().items()} == {1: 3}
    played = env.chunk_step(np.ones((2, 1, 2), np.float32), np.ones(2, bool), True)
    assert played.executed[:, 0].tolist() == [True, False] and env.faults() == {1: []}
    env.close()


def test_an_env_that_ends_its_process_in_every_reset_is_named_with_its_state():
    """Also where it is not the first in its process, whose others break with it."""
    config = FragileConfig(fault="abort reset", states=(BAD,), processes=Processes(envs_per_process=2))
    env = fragile.build(config, EnvContext(num_envs=2, chunk=1))
    with pytest.raises(UserError, match=rf"^env 1 broke 3 times in reset, from state {BAD}:"):
        env.reset(np.arange(2), np.array([33, BAD]), np.arange(2))
    env.close()


def test_frames_of_an_episode_that_was_given_up_are_dropped():
    frames = FrameRecorder(("main",))
    obs = Observation(images={"main": np.zeros((1, 8, 8, 3), np.uint8)}, instructions=("",))
    request = EpisodeRequest(state=ResetState(id=0, task="sign"), number=0, record=True)
    frames.begin_episode(0, request, obs, 0)
    frames.begin_episode(0, EpisodeRequest(state=request.state, number=1), obs, 0)
    frames.end_episode(0)
    assert not frames.finished


def test_a_stream_in_a_state_that_was_excluded_begins_again(tmp_path):
    states = {i: ResetState(id=i, task="sign") for i in (1, 2)}
    streams = EnvStreams()
    for env, state in enumerate(states.values()):
        streams.consumed[env] = EpisodeRequest(state=state, number=0, env_id=env, episode=3)
    streams.save(tmp_path / "streams.npz")
    resumed = EnvStreams()
    resumed.load(tmp_path / "streams.npz", {2: states[2]})
    assert list(resumed.consumed) == [1]
    again = resumed.issue_ticket(EpisodeRequest(state=states[2], number=0, env_id=0))
    assert again.episode == 0 and again.actions is not None
