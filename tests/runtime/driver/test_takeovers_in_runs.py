"""Runs in which a person takes over: what policy gradients train on, metrics, results and data sets."""

from __future__ import annotations

import json

import helped_env
import numpy as np
import pytest
import torch
from attrs import evolve
from scripted_runs import play, read_metrics, scripted_spec, weights_in

from vla_rl.core.catalogue import build
from vla_rl.core.contexts import DataContext, EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.run.loop import finish_step
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.start import clone, evaluate, run, start

PPO = {"type": "ppo", "value_coef": 0.5}


def helped_spec(*, env=None, **changes):
    spec = scripted_spec(**{"train": {"steps": 2}, **changes})
    spec["env"] = {"type": "helped", "num_envs": 4, **(env or {})}
    return parse_spec({**spec, "plugins": [*spec["plugins"], helped_env.__name__]})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": PPO},
        {"asynchrony": {"streaming_update": True}, "train": {"steps": 2, "global_batch": None, "micro_batch": 4}},
    ],
    ids=["grpo", "ppo", "streaming"],
)
def test_what_comes_after_a_takeover_changes_no_weight(tmp_path, changes):
    """The person pushes with another force, keeps the robot for longer and so decides other episodes: policy gradients
    see none of it, whereas the policy's own part of those episodes does count."""
    for name, env in {"weak": {"push": 0.1, "last": 3}, "strong": {"push": 1.0, "last": 5}}.items():
        run(helped_spec(env=env, **changes), tmp_path / name, False)
    weak, strong = (weights_in(tmp_path / name) for name in ("weak", "strong"))
    assert all(torch.equal(weak[name], strong[name]) for name in weak)
    returns = [[m["env/return"] for m in read_metrics(tmp_path / n) if "env/return" in m] for n in ("weak", "strong")]
    assert returns[0] != returns[1], "the person's force decides nothing, so this test shows nothing"


def test_the_policys_part_of_helped_episodes_is_trained_on():
    """Chunks of two, a takeover at step 3: the first chunk and an action of the second are left of helped episodes."""
    runtime = start(helped_spec())
    try:
        rollout, _ = play(runtime, 1)
        raw = runtime.rollouts.current_batch.rollout
        by_person = raw.source.bool() & raw.valid
        helped_columns = by_person.any(-1).any(0)
        assert 0 < int(helped_columns.sum()) < len(helped_columns)
        assert (rollout.valid.sum((0, 2)) == torch.where(helped_columns, 3, helped_env.LENGTH)).all()
        assert not rollout.success[helped_columns].any() and not rollout.rewards[:, helped_columns].any()
        assert raw.executed_actions.shape == (*raw.source.shape, 2)
        assert np.isclose(raw.executed_actions[by_person].abs().numpy(), [0.75, 0.0]).all()
        finish_step(runtime, runtime.fleet.version + 1, False)
    finally:
        runtime.workers.close()


def test_a_run_in_which_the_person_does_everything_says_so(tmp_path):
    """Episodes without an action of the policy are no data: updates are skipped, and then the run ends with the
    reason."""
    changes = {"env": {"first": 0, "each": 1}, "train": {"steps": 8, "max_skipped": 2}}
    with pytest.raises(UserError, match="in 2 training steps in a row .* an operator took over before the policy's"):
        run(helped_spec(**changes), tmp_path / "run", False)
    lines = [line for line in read_metrics(tmp_path / "run") if "rollout/episodes" in line]
    assert [line["update/skipped"] for line in lines] == [1.0, 1.0]
    assert all(line["env/intervention_rate"] > 0 for line in lines)


def test_executed_actions_outside_of_the_bounds_are_counted_and_warned_of_once(tmp_path, caplog):
    run(helped_spec(env={"push": 1e6}), tmp_path / "wild", False)
    run(helped_spec(env={"push": 1.0}), tmp_path / "tame", False)
    wild, tame = (
        [line for line in read_metrics(tmp_path / name) if "rollout/episodes" in line] for name in ("wild", "tame")
    )
    steps = [line["env/intervention_rate"] * line["env/episode_length"] * line["rollout/episodes"] for line in wild]
    assert [line["env/outside_bounds"] for line in wild] == pytest.approx(steps) and min(steps) > 0
    assert not any("env/outside_bounds" in line for line in tame)
    said = [
        record.getMessage() for record in caplog.records if "outside of the simulator's bounds" in record.getMessage()
    ]
    (text,) = said
    assert text.startswith(
        f"warning: step 1: {steps[0]:.0f} of {steps[0]:.0f} actions of whoever took over were outside"
    )
    assert "1e+06 in dimension 0, not within [-1, 1]" in text


def test_metrics_results_and_evaluations_count_interventions(tmp_path):
    """Half of the evaluation states are even, and 2 of their 6 steps are the person's."""
    spec = helped_spec(train={"steps": 1})
    results = run(spec, tmp_path / "run", False)
    for suffix in ("", "_before"):
        interventions = results[f"interventions{suffix}"]
        assert interventions["rate"] == pytest.approx(1 / 6) and interventions["episodes"] == 0.5
        assert interventions["unaided"]["rate"] <= results[f"success{suffix}"]["rate"]
    lines = read_metrics(tmp_path / "run")
    assert all(line["eval/intervention_rate"] == pytest.approx(1 / 6) for line in lines if "eval/episodes" in line)
    rollouts = [line for line in lines if "env/return" in line]
    assert rollouts and all(0 <= line["env/intervention_rate"] <= 1 / 3 for line in rollouts)
    assert all(line["env/unaided_success"] <= line["env/success_rate"] for line in rollouts)
    alone = evaluate(helped_spec(env={"first": helped_env.LENGTH}), None)
    assert alone["interventions"]["rate"] == 0 and alone["interventions"]["unaided"] == alone["success"]
    assert {episode["interventions"] for episode in alone["episodes"]} == {0}


def test_data_sets_say_which_frames_are_interventions(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra: pip install -e '.[data]'")
    hooks = [{"type": "lerobot", "what": "both"}]
    run(helped_spec(train={"steps": 1}, hooks=hooks), tmp_path / "run", False)
    folder = tmp_path / "run" / "lerobot"
    info = json.loads((folder / "meta" / "info.json").read_text())
    assert info["features"]["is_intervention"] == {"dtype": "bool", "shape": [1], "names": None}
    tables = [pq.read_table(file).to_pydict() for file in sorted((folder / "data").rglob("*.parquet"))]
    flags = [table["is_intervention"] for table in tables]
    assert [False] * helped_env.LENGTH in flags and [False, False, False, True, True, False] in flags
    for table in tables:
        for action, by_person in zip(table["action"], table["is_intervention"], strict=True):
            assert not by_person or np.isclose(np.abs(action), [0.75, 0.0]).all()


@pytest.mark.parametrize("rows", ["steps", "chunks"])
def test_interventions_of_a_recording_are_cloned_alone(tmp_path, rows):
    """The samples of `only: interventions` are those that begin with an action of the person, who pushes 0.75 towards
    the target; `vla-rl sft` trains on them."""
    pytest.importorskip("datasets", reason="needs the extra: pip install -e '.[data]'")
    hooks = [{"type": "lerobot", "what": "evaluation", "rows": rows}]
    # Chunks of two, so the takeover of steps 2 to 4 begins with a chunk.
    run(helped_spec(env={"first": 2}, train={"steps": 1}, hooks=hooks), tmp_path / "run", False)
    data = {"type": "lerobot", "folder": str(tmp_path / "run" / "lerobot"), "only": "interventions"}
    spec = helped_spec(imitation={"data": data, "steps": 2, "batch": 8, "lr": 1e-2}, hooks=[{"type": "jsonl"}])
    info = helped_env.helped_envs(spec.env.config, EnvContext(num_envs=1, chunk=2)).info
    assert spec.imitation is not None and spec.imitation.data is not None
    demonstrations = build("data", "lerobot", spec.imitation.data.config, DataContext(env=info, chunk=2))
    helped_episodes = 2 * 8  # half of the evaluation states, before and after training
    assert demonstrations.num_samples() == helped_episodes * (3 if rows == "steps" else 2)
    obs, actions = demonstrations.read_samples(np.arange(demonstrations.num_samples()))
    assert np.allclose(actions[:, 0], obs.state[:, :1] * [0.75, 0.0])
    with pytest.raises(UserError, match="reads samples without those that follow them"):
        demonstrations.read_rewards(np.arange(1), 1.0)
    assert clone(spec, tmp_path / "clone", False)["steps"] == 2
    everything = evolve(spec.imitation.data.config, only="all")
    whole = build("data", "lerobot", everything, DataContext(env=info, chunk=2))
    flags = whole.read_rewards(np.arange(whole.num_samples()), 1.0).interventions
    assert flags.dtype == bool and flags.sum() == demonstrations.num_samples() < len(flags)
    assert np.array_equal(whole.read_samples(np.flatnonzero(flags))[1], actions)


def test_a_recording_without_interventions_is_refused_where_they_are_wanted(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra: pip install -e '.[data]'")
    hooks = [{"type": "lerobot", "what": "evaluation"}]
    for name, env, message in (
        ("none", {"first": helped_env.LENGTH}, "has no sample that begins with an intervention"),
        ("no_person", {"first": helped_env.LENGTH, "announced": False}, "has no feature 'is_intervention'"),
    ):
        run(helped_spec(env=env, train={"steps": 1}, hooks=hooks), tmp_path / name, False)
        data = {"type": "lerobot", "folder": str(tmp_path / name / "lerobot"), "only": "interventions"}
        spec = helped_spec(imitation={"data": data, "steps": 2, "batch": 8, "lr": 1e-2})
        with pytest.raises(UserError, match=message):
            clone(spec, tmp_path / f"{name} clone", False)
