"""`vla-rl why`: what a run's files say, and what one of its steps shows when it is played again."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from typer.testing import CliRunner

import vla_rl
from vla_rl.cli.main import app
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.spec.yaml import dump_yaml

SPEC = {
    "name": "asked",
    "plugins": ["vla_rl.testing.scripted"],
    "model": {"type": "linear"},
    "env": {"type": "scripted", "num_envs": 16},
    "rollout": {"chunk": 2, "episodes": 32, "group_size": 8},
    "algorithm": {"type": "grpo"},
    "runtime": {"backend": "local"},
    "train": {"steps": 3, "lr": 6e-2, "micro_batch": 16, "global_batch": 32, "checkpoint_every": 1},
    "eval": {"before": False, "episodes_per_task": 4},
    "hooks": [{"type": "jsonl"}],
}
STEP = {
    "time/step": 1.0,
    "rollout/episodes": 64,
    "env/success_rate": 0.4,
    "env/return": 0.4,
    "env/episode_length": 12.0,
}
UPDATE = {
    "update/optimizer_steps": 4.0,
    "update/weights_changed": 0.8,
    "policy/approx_kl": 2e-3,
    "policy/entropy": 0.9,
    "policy/lag_mean": 0.0,
    "policy/ratio_abs_log_p95": 0.1,
    "loss/clip_fraction": 0.04,
    "groups/kept": 7.0,
    "groups/filtered": 1.0,
}


def write_run(folder: Path, steps: list[dict], **overrides: dict) -> Path:
    """Write the folder of a run with these metrics, and no checkpoint."""
    folder.mkdir()
    spec = {**SPEC, **{name: {**SPEC[name], **changes} for name, changes in overrides.items()}}
    (folder / "spec.yaml").write_text(dump_yaml(parse_spec(spec).to_dict()))
    lines = [json.dumps({"step": number, **step}) for number, step in enumerate(steps, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("changes", "overrides", "name"),
    [
        ({"policy/entropy": 0.001}, {}, "no exploration"),
        ({"groups/kept": 0.0, "groups/filtered": 8.0}, {}, "members of a group are alike"),
        ({"env/success_rate": 0.0, "env/return": 0.0}, {}, "hardly any success"),
        ({"env/return": 0.0}, {}, "success brings no reward"),
        ({"loss/clip_fraction": 0.6, "policy/approx_kl": 1e-3}, {}, "clip too narrow"),
        ({"loss/clip_fraction": 0.5, "policy/approx_kl": 0.2}, {}, "rate too high"),
        ({"loss/clip_fraction": 0.5, "policy/approx_kl": 0.2}, {"train": {"epochs": 20}}, "too many epochs"),
        ({"loss/clip_fraction": 0.0, "policy/approx_kl": 1e-7}, {}, "rate too low"),
        ({"policy/lag_mean": 3.0, "policy/ratio_abs_log_p95": 0.8}, {}, "data too old"),
        ({"value/explained_variance": -0.1}, {}, "the critic explains nothing"),
    ],
)
def test_a_symptom_names_its_cause(tmp_path, changes, overrides, name):
    found = vla_rl.why(write_run(tmp_path / "run", [STEP | UPDATE | changes] * 10, **overrides))
    assert found.answer == "causes" and name in [cause.name for cause in found.causes]
    assert all(cause.stage == 1 and cause.evidence and cause.key for cause in found.causes)


def test_a_critic_has_ten_steps_to_explain_something(tmp_path):
    steps = [STEP | UPDATE | {"value/explained_variance": -0.1}] * 9
    assert not vla_rl.why(write_run(tmp_path / "run", steps)).causes


@pytest.mark.parametrize(("interventions", "alarms"), [(0.0, ["evaluation is greedy"]), (1.0, [])])
def test_rollouts_in_which_an_expert_acts_say_nothing_of_greedy_evaluations(tmp_path, interventions, alarms):
    evaluation = {"success_rate": 0.0, "success_low": 0.0, "success_high": 0.1, "episodes": 32}
    step = STEP | UPDATE | {"env/intervention_rate": interventions} | {f"eval/{k}": v for k, v in evaluation.items()}
    assert [cause.name for cause in vla_rl.why(write_run(tmp_path / "run", [step] * 3)).causes] == alarms


def test_curves_of_a_run_that_learns_name_nothing(tmp_path):
    steps = [STEP | UPDATE | {"env/success_rate": rate} for rate in (0.3, 0.35, 0.4, 0.5, 0.6, 0.7)]
    found = vla_rl.why(write_run(tmp_path / "run", steps))
    assert (found.answer, found.causes) == ("healthy", [])
    assert any("the budget is" in text for text in found.not_looked_at), "a fifth of 6 s starts no simulator"


def test_a_strong_discount_is_named_with_its_number(tmp_path):
    folder = write_run(tmp_path / "run", [STEP | UPDATE] * 3)
    changed = parse_spec({**SPEC, "algorithm": {"type": "ppo", "advantage": "chunk", "gamma": 0.3}})
    (folder / "spec.yaml").write_text(dump_yaml(changed.to_dict()))
    cause = vla_rl.why(folder).causes[0]
    assert cause.name == "discount too strong" and cause.number == pytest.approx(0.3**5)


FAULTS = '''
"""Faults between a run and its simulator or algorithm."""
import numpy as np
import torch
from attrs import evolve
from vla_rl import Counterfactual, hookimpl
from vla_rl.cli.why.repeat import plain_loss

@hookimpl(wraps="env")
def chunk_step(actions):
    result = yield
    return REWARDS(result)

@hookimpl(wraps="model")
def chunk_log_probs(chunk):
    result = yield
    return SCORES(result)

@hookimpl(wraps="algorithm")
def advantages(rollout):
    result = yield
    return ADVANTAGES(result)

def REWARDS(result):
    return result

def half(weights):
    return weights * (torch.arange(weights.shape[1]) % 2).view(-1, *[1] * (weights.dim() - 2))

def ADVANTAGES(result):
    return result

def SCORES(result):
    return result

vla_rl_counterfactuals = [Counterfactual(name="of a third party", cause="theirs", key="their key", loss=plain_loss)]
'''


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a short run with a fault, and returns its folder."""

    def train(fault: str = "", **changes):
        folder = tmp_path_factory.mktemp("run")
        plugin = folder / "faults.py"
        plugin.write_text(FAULTS + fault)
        spec = {**SPEC, **changes, "plugins": [*SPEC["plugins"], str(plugin)]}
        vla_rl.run(spec, folder / "run")
        return folder / "run"

    return train


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def healthy(trained):
    return trained()


def test_a_repeated_step_is_the_recorded_one_and_changes_no_file(healthy):
    before, heard = contents(healthy), []
    found = vla_rl.why(healthy, budget="300s", say=heard.append)
    assert found.repeated == "step 3; its episodes are the recorded ones"
    assert not found.causes, found.causes
    assert found.compared["as the run does"] > 0.5
    assert "of a third party" in found.compared, "a module of plugins: adds a row"
    assert contents(healthy) == before and heard[0].startswith("step 3 is repeated")


def test_a_step_that_trains_on_older_weights_is_repeated_and_its_noise_measured(trained):
    found = vla_rl.why(trained(rollout={**SPEC["rollout"], "lag": 1}), budget="300s")
    assert found.repeated == "step 3; its episodes are the recorded ones"
    assert found.compared and not any("noise" in text for text in found.not_looked_at)


def test_an_earlier_step_is_repeated_too(healthy):
    assert vla_rl.why(healthy, step=1, budget="300s").repeated.startswith("step 1; its episodes are the recorded")


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("def REWARDS(result): return evolve(result, rewards=-np.asarray(result.rewards))", "rewards have the wrong sign"),
        ("def REWARDS(result): return evolve(result, rewards=np.asarray(result.rewards).clip(-.1, .1))", "rewards are clipped"),
        ("def SCORES(result): return evolve(result, log_probs=result.log_probs - 0.5)", "acting and scoring differ"),
        ("def ADVANTAGES(result): return evolve(result, weights=half(result.weights))", "a wrong mask"),
    ],
)  # fmt: skip
def test_a_fault_is_named_by_one_repeated_step(trained, fault, name):
    found = vla_rl.why(trained(fault), budget="300s")
    assert found.causes[0].name == name and found.causes[0].stage == 2


def test_negated_advantages_are_named_by_a_counterfactual(trained):
    found = vla_rl.why(
        trained("def ADVANTAGES(result): return evolve(result, advantages=-result.advantages)"), budget="300s"
    )
    assert found.compared["as the run does"] < 0 < found.compared["advantages from true returns"]
    assert found.causes[0].name == "the advantages are wrong"


@pytest.mark.parametrize("budget", ["", "%", "20", "-3%", "soon"])
def test_a_budget_has_a_unit(healthy, budget):
    with pytest.raises(vla_rl.UserError, match="such as 20%, or seconds"):
        vla_rl.why(healthy, budget=budget)


def test_a_step_that_the_run_has_not_made_is_not_repeated(healthy):
    found = vla_rl.why(healthy, step=99, budget="300s")
    assert not found.repeated and any("--step 99: the run has made 3 steps" in text for text in found.not_looked_at)


def test_a_trainer_of_transitions_is_not_repeated_and_json_says_so(tmp_path):
    folder = write_run(tmp_path / "run", [STEP | UPDATE])
    changed = parse_spec({**SPEC, "trainer": {"type": "off_policy"}, "rollout": {"chunk": 2, "episodes": 32}})
    (folder / "spec.yaml").write_text(dump_yaml(changed.to_dict()))
    printed = CliRunner().invoke(app, ["why", str(folder), "--budget", "100s", "--json"]).stdout
    told = json.loads(printed)
    assert told.keys() == {field.name for field in attrs.fields(vla_rl.Diagnosis) if field.init}
    assert any("'off_policy' keeps transitions" in text for text in told["not_looked_at"])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(vla_rl.UserError, match="not the folder of a run"):
        vla_rl.why(tmp_path)
