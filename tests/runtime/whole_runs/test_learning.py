"""The whole path on the local backend: it learns, and every mode of a rollout trains."""

from __future__ import annotations

import json

import pytest
import torch
from scripted_runs import advance, play, scripted_spec, weights_of

from vla_rl.core.errors import UserError
from vla_rl.core.plan import Batching, Plan, Slot
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.placement.assignments import assign_workers
from vla_rl.runtime.start import start

PPO = {"group_size": 1, "episodes": 32}


def test_grpo_learns_the_sign(train, tmp_path):
    results, metrics = train(train={"steps": 10}, rollout={"episodes": 64, "group_size": 8})
    assert results["success_before"]["rate"] <= 0.7
    assert results["success"]["rate"] >= 0.95
    assert results["success"]["n"] == 64
    for of_tasks, of_all in (("tasks", "success"), ("tasks_before", "success_before")):
        rates = results[of_tasks].values()
        won = sum(task["rate"] * task["n"] for task in rates)
        assert won == pytest.approx(results[of_all]["rate"] * 64) and sum(task["n"] for task in rates) == 64
    assert [m["step"] for m in metrics] == [0, *range(1, 11), 10]
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    assert written["success"] == results["success"]
    assert (tmp_path / "run" / "environment.json").exists() and (tmp_path / "run" / "spec.yaml").exists()


@pytest.mark.parametrize("advantage", ["chunk", "action"])
def test_ppo_learns_the_sign(train, advantage):
    results, _ = train(
        algorithm={"type": "ppo", "advantage": advantage}, rollout=PPO, train={"steps": 12, "critic_warmup_steps": 1}
    )
    assert results["success"]["rate"] >= 0.95


@pytest.mark.parametrize("mode", ["immediate", "deferred"])
@pytest.mark.parametrize("ignore", [False, True])
def test_ppo_trains_with_auto_reset(train, mode, ignore):
    rollout = {
        "episodes": None,
        "auto_reset": {"steps": 12, "mode": mode},
        "group_size": 1,
        "ignore_terminations": ignore,
    }
    results, metrics = train(algorithm={"type": "ppo"}, rollout=rollout, env={"length": 3}, train={"steps": 8})
    assert results["success"]["rate"] >= 0.9
    assert metrics[1]["rollout/env_steps"] == 8 * 12 if ignore or mode == "deferred" else 8 * 9


def test_critic_warm_up_leaves_the_actor_alone(tmp_path):
    spec = parse_spec(scripted_spec(algorithm={"type": "ppo"}, rollout=PPO, train={"critic_warmup_steps": 1}))
    runtime = start(spec)
    try:
        before = weights_of(runtime)
        for step, changed in ((1, False), (2, True)):
            advance(runtime, step)
            moved = {name for name, weight in weights_of(runtime).items() if not torch.equal(weight, before[name])}
            assert any(name.startswith("value_head.") for name in moved)
            assert any(not name.startswith("value_head.") for name in moved) == changed
    finally:
        runtime.workers.close()


def test_warm_up_clones_the_expert(train):
    results, metrics = train(bc_warmup={"episodes": 16, "epochs": 30, "lr": 3e-2}, train={"steps": 0})
    assert metrics[0]["bc_warmup/expert_success"] == 1.0
    assert results["success"]["rate"] >= 0.95


def test_evaluation_is_the_same_for_any_number_of_envs(train):
    rates = []
    for num_envs in (8, 5):
        rollout = {"group_size": 1, "episodes": num_envs * 2}
        results, _ = train(
            f"envs{num_envs}",
            env={"num_envs": num_envs},
            rollout=rollout,
            algorithm={"type": "ppo"},
            train={"steps": 0},
            eval={"greedy": False, "repeats": 3},
        )
        rates.append((results["success"], results["repeats"], results["repeats_std"]))
    assert rates[0] == rates[1]
    assert rates[0][0]["n"] == 3 * 64 and len(set(rates[0][1])) > 1


def test_a_rollout_without_signal_skips_the_update(train):
    _, metrics = train(
        env={"length": 9, "max_steps": 8}, train={"steps": 1}
    )  # no episode can succeed: all groups are equal
    assert metrics[1]["update/skipped"] == 1.0 and metrics[1]["rollout/kept"] == 0.0


def test_groups_share_a_state_and_envs_of_a_group_differ(train):
    runtime = start(parse_spec(scripted_spec()))
    try:
        rollout, _ = play(runtime, 1)
    finally:
        runtime.workers.close()
    assert rollout.groups.tolist() == [n // 4 for n in range(16)]
    states: dict[int, set[int]] = {}
    for n, episode in enumerate(sorted(rollout.episodes, key=lambda e: e.number)):
        states.setdefault(n // 4, set()).add(episode.state)
    assert all(len(s) == 1 for s in states.values()) and len(set().union(*states.values())) == 4
    assert rollout.log_probs[0, :4].unique(dim=0).shape[0] > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"group_size": 1}}, "group_size >= 2"),
        ({"rollout": {"episodes": None, "auto_reset": {"steps": 8}}}, "without rollout.auto_reset"),
    ],
)
def test_grpo_without_groups_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        check_spec(parse_spec(scripted_spec(**changes)), training=True)


def test_seats_follow_the_plan():
    slots = tuple(Slot(roles=(role,)) for role in ("sim", "sim", "policy", "learner", "learner"))
    assignments = assign_workers(Plan(slots=slots, stages=2, batching=Batching()), 16, one_process=False)
    assert [[lane.first_env for lane in s.lanes] for s in assignments] == [[0, 4], [8, 12], [], [], []]
    assert [lane.index for lane in assignments[2].served] == [0, 1, 2, 3]
    assert [s.rank for s in assignments] == [-1, -1, -1, 0, 1] and assignments[3].world == 2
    assert assignments[2].batching.max_batch == 4  # with stages, one lane at a time
    one = assign_workers(Plan(slots=slots, stages=2), 16, one_process=True)
    assert len(one) == 1 and len(one[0].lanes) == 4 and one[0].is_local
    with pytest.raises(UserError, match="10 envs cannot be shared evenly by 4 lanes"):
        assign_workers(Plan(slots=slots, stages=2), 10, one_process=False)


@pytest.mark.parametrize(("imagines", "peers"), [(False, [[], []]), (True, [[], [0]])])
def test_who_practises_calls_the_first_simulators(imagines, peers):
    slots = tuple(Slot(roles=("sim", "policy", "learner")) for _ in range(2))
    assignments = assign_workers(Plan(slots=slots, batching=Batching()), 8, one_process=False, adds_envs=imagines)
    assert [assignment.peer_workers for assignment in assignments] == peers
    assert all(assignment.is_local for assignment in assignments)


@pytest.mark.parametrize(("evaluation", "steps"), [({"every": 2}, [0, 2, 4, 5]), ({"before": False}, [5])])
def test_when_to_evaluate(train, evaluation, steps):
    _, metrics = train(train={"steps": 5}, eval=evaluation)
    assert [m["step"] for m in metrics if "eval/success_rate" in m] == steps
