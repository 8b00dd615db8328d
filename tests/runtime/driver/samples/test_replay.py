"""Trajectories that are trained on more than once: how often, with which values, and that nothing is left behind."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from attrs import evolve
from scripted_runs import LOSS_APART, finish, play, scripted_spec, weights_of

from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.plan import Cluster, Node, Plan, Slot
from vla_rl.core.run.selection import take_columns
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.sections import ReplaySpec
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.comm.backends.local import LocalBackend
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.driver.samples.replay import ReplayIndex
from vla_rl.runtime.planning.memory import check_memory, trajectory_bytes
from vla_rl.runtime.start import start
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel

GIPO = {"algorithm": {"type": "gipo"}, "rollout": {"group_size": 1}}
SHORT = {"before": False, "episodes_per_task": 1}


def replaying(uses, **settings):
    return {"asynchrony": {"replay": {"uses": uses, **settings}}}


@contextmanager
def runtime(**changes):
    made = start(parse_spec(scripted_spec(**{"runtime": {"backend": "local"}, **changes})))
    try:
        yield made
    finally:
        made.workers.close()


# ------------------------------------------------------------------------------------------------------ bookkeeping


def played_out(section, *, steps=40, per_step=6, seed=0):
    """Steps with what filters leave of `per_step` groups, some of them discarded. -> (uses of each group, groups held after
    each step, ages at later uses, what is there in the end)."""
    replay = ReplayIndex(section, section.capacity or (section.uses - 1) * per_step, seed)
    rng = np.random.default_rng(seed)
    uses, depths, ages, first = Counter(), [], [], 0
    born = {}
    for step in range(steps):
        new = range(first, first + int(rng.integers(0, per_step + 1)))
        first += per_step
        gone = replay.drop_expired(step)
        if not new:
            assert not set(gone) & set(replay.groups)
            continue
        again = replay.choose_groups(step, len(new))
        assert again == sorted(set(again)) == replay.choose_groups(step, len(new)) and not set(again) & set(new)
        born |= dict.fromkeys(new, step - int(rng.integers(0, 2)))
        ages += [step - born[group] for group in again]
        uses.update([*again, *new])
        leaving = [*gone, *replay.record_use(again, {group: born[group] for group in new})]
        assert not set(leaving) & set(replay.groups) and len(set(leaving)) == len(leaving)
        depths.append(len(replay.groups))
    return uses, depths, ages, replay


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("uses", [2, 3, 5])
def test_oldest_uses_every_group_so_often(uses, seed):
    found, depths, _, replay = played_out(ReplaySpec(uses=uses), seed=seed)
    assert {n for group, n in found.items() if group not in replay.groups} == {uses}
    assert max(depths) <= (uses - 1) * 6


@pytest.mark.parametrize("seed", range(5))
def test_uniform_draws_from_the_newest_that_are_kept(seed):
    section = ReplaySpec(uses=3, capacity=40)
    found, depths, _, replay = played_out(section, steps=400, seed=seed)
    assert max(depths) == 40 and max(found.values()) > 4 and min(found.values()) == 1
    assert sum(found.values()) / len(found) == pytest.approx(3, rel=0.05)
    assert list(replay.groups) == sorted(found)[-40:]


@pytest.mark.parametrize("section", [ReplaySpec(uses=4, max_lag=2), ReplaySpec(uses=3, capacity=40, max_lag=3)])
def test_nothing_is_used_that_is_too_old(section):
    _, _, ages, _ = played_out(section, steps=100)
    assert max(ages) == section.max_lag


def test_draws_are_keyed_by_seed_and_step():
    section = ReplaySpec(uses=2, capacity=60)

    def drawn(seed, step):
        replay = ReplayIndex(section, section.capacity or (section.uses - 1) * 6, seed)
        replay.record_use([], dict.fromkeys(range(60), 0))
        return replay.choose_groups(step, 6)

    assert drawn(0, 3) == drawn(0, 3) and len({tuple(drawn(seed, step)) for seed in (0, 1) for step in (3, 4)}) == 4


# ------------------------------------------------------------------------------------------------------------ training


def steps_of(metrics):
    return [line for line in metrics if "update/samples" in line]


def test_a_run_trains_on_every_trajectory_so_often(train):
    results, metrics = train(**GIPO, **replaying(3), train={"steps": 5, "epochs": 1}, eval=SHORT)
    steps = steps_of(metrics)
    assert [line["rollout/episodes"] for line in steps] == [16] * 5  # metrics of rollouts are of what is new
    assert results["tickets"]["trained"] == 5 * 16
    assert results["replay"]["reused"] == (1 + 2 + 2 + 2) * 16
    assert [line["replay/groups"] for line in steps] == [16, 32, 32, 32, 32]
    assert [line.get("replay/lag_max") for line in steps] == [None, 1, 2, 2, 2]
    assert [line["policy/lag_max"] for line in steps] == [0, 1, 2, 2, 2]
    new = [line["update/samples"] * (1 - line["replay/share"]) for line in steps]
    assert steps[4]["update/samples"] == pytest.approx(sum(new[2:]))
    assert all(line["replay/mib"] > 0 for line in steps)


def test_uses_1_changes_nothing(train):
    _, expected = train("plain", **GIPO)
    _, got = train("once", **GIPO)
    assert got == expected


def trained_step(made, step, keep=None):
    """-> (what was prepared, the version that it was prepared with)."""
    rollout, _ = play(made, step)
    columns = np.arange(rollout.valid.shape[1]) if keep is None else keep
    prepared = made.samples.prepare(take_columns(rollout, columns), columns)
    version = made.fleet.version
    made.learners.train(prepared, made.algorithm.advantages(prepared))
    return prepared, version


def lies_there(made):
    return sum(len(made.backend.worker.roles["learner"].buffer) for _ in made.fleet.learners)


@pytest.mark.parametrize("algorithm", [{"type": "gipo"}, {"type": "ppo", "correction": {"type": "decoupled"}}])
def test_values_are_those_of_the_critic_at_each_use(algorithm):
    """Also of final observations, and log-probs of chunks stay those of the policy that acted."""
    algorithm = {**algorithm, "advantage": "action", "time_limit": "bootstrap"}
    fixed = {"episodes": None, "auto_reset": {"steps": 8}, "group_size": 1, "ignore_terminations": True}
    changes = {"rollout": fixed, "env": {"length": 3}, "train": {"lr": 0.1}, "algorithm": algorithm}
    with runtime(**changes, **replaying(2)) as made:
        first, _ = trained_step(made, 1)
        finish(made)
        learner = made.backend.worker.roles["learner"]
        critic = LinearModel(made.info, 2, values="action")
        critic.load_weights(weights_of(made).items())
        again = made.samples.router.replay.batches
        assert sorted(again) == list(range(8))
        whole, version = trained_step(made, 2)
        assert version == 1 and whole.groups.tolist() == list(range(16))
        steps, columns = np.nonzero(whole.samples.numpy()[:, :8])
        named = {
            name: np.stack([again[g].sample_ids[:, 0] for g in range(8)], 1)[steps, columns] for name in ["sample_ids"]
        }
        workers = np.zeros(len(steps), np.int64)
        heavy = learner.buffer.find_inputs(workers, named["sample_ids"]).take(np.arange(len(steps)))
        torch.testing.assert_close(whole.values[steps, columns], critic.values(heavy.obs))
        assert not torch.allclose(whole.values[:, :8], first.values, atol=1e-4)
        ended = np.stack([again[g].ended[:, 0] for g in range(8)], 1)[steps, columns]
        assert ended.any() and not ended.all()
        finals = learner.buffer.find_finals(workers[ended], named["sample_ids"][ended]).take(
            np.arange(int(ended.sum()))
        )
        ends = whole.next_values[steps, columns]
        torch.testing.assert_close(ends[ended], critic.values(finals)[:, 0])
        assert not ends[~ended].any() and not torch.allclose(ends[ended], first.next_values[steps, columns][ended])
        for name in ("log_probs", "versions", "rewards", "valid", "truncated"):
            assert torch.equal(getattr(whole, name)[:, :8], getattr(first, name)), name
        if algorithm["type"] == "ppo":
            assert torch.equal(whole.proximal_log_probs[:, 8:], whole.log_probs[:, 8:])
            assert not torch.allclose(whole.proximal_log_probs[:, :8], whole.log_probs[:, :8], atol=1e-3)


def test_nothing_is_left_of_what_is_not_trained_on():
    """With filters, a step that trains on nothing, and groups that are dropped in part."""
    changes = {"algorithm": {"type": "grpo", "correction": {"type": "decoupled"}}}
    with runtime(**changes, **replaying(2)) as made:
        samples = []
        for step, keep in enumerate([np.arange(16), np.arange(3, 9), None, np.arange(12)], 1):
            if keep is None:
                play(made, step)
            else:
                prepared, _ = trained_step(made, step, keep)
                samples.append(int(prepared.samples[:, -len(keep) :].sum()))
            finish(made, trained=keep is not None)
            assert lies_there(made) == samples[-1]
            assert not made.backend.worker.roles["policy"].samples.inferences
        assert list(made.samples.router.replay.batches) == [12, 13, 14]
        learner = made.fleet.learners[0]
        assert (
            made.fleet.get(
                learner.call(LearnerInterface.release_samples, made.samples.router.replay.batches[12].ids_by_worker())
            )
            > 0
        )
        for group in (13, 14):
            left = made.fleet.get(
                learner.call(
                    LearnerInterface.release_samples, made.samples.router.replay.batches[group].ids_by_worker()
                )
            )
        assert left == 0 == lies_there(made)


def test_a_resumed_run_fills_its_buffer_again(train, tmp_path, caplog):
    changes = {**GIPO, **replaying(2), "eval": SHORT}
    train("parts", **changes, train={"steps": 2, "epochs": 1, "checkpoint_every": 1})
    results, metrics = train("parts", resume=True, **changes, train={"steps": 4, "epochs": 1, "checkpoint_every": 1})
    steps = steps_of(metrics)
    assert "the replay buffer is not part of a checkpoint" in caplog.text
    assert [line["replay/share"] > 0 for line in steps] == [False, True, False, True]
    assert results["replay"]["refilled"] == 1 and results["replay"]["reused"] == 2 * 16
    state = json.loads((tmp_path / "parts/checkpoints/last/trainer/state.json").read_text())
    assert {name: state[name] for name in ("reused", "refilled")} == results["replay"]


def test_weighted_tasks_count_what_is_new(train):
    """An episode is an outcome of its task once, however often it is trained on."""
    sampling = {"rollout": {"group_size": 1, "task_sampling": {"type": "weighted"}}, "algorithm": {"type": "gipo"}}
    changes = {"train": {"steps": 3, "epochs": 1}, "eval": SHORT}
    with runtime(**sampling, **replaying(3)) as made:
        for step in range(1, 4):
            trained_step(made, step)
            finish(made)
        weighting = made.rollouts.requests.task_weighting
        assert sum(map(len, weighting.failed.values())) + len(weighting.newest[1]) == 3 * 16
    _, metrics = train(**sampling, **replaying(3), **changes)
    assert all(any(name.startswith("sampling/weight/") for name in line) for line in steps_of(metrics))


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm": {"type": "ppo"}, "rollout": {"group_size": 1}, **replaying(2)},
            "replay.uses: algorithm 'ppo', as it is set, .*use gipo, or a `correction`",
        ),
        ({"algorithm": {"type": "grpo"}, **replaying(3)}, "replay.uses: algorithm 'grpo'"),
        (
            {**GIPO, **replaying(3, capacity=31)},
            r"replay.capacity: 31 groups are too few to draw from: .*\(2 x 16\); give more, such as 64, or leave",
        ),
        ({**GIPO, **replaying(2, capacity=16)}, "replay.capacity: 16 groups are too few to draw from"),
        (
            {"algorithm": {"type": "gipo"}, "rollout": {"group_size": 1, "lag": 2}, **replaying(2, max_lag=2)},
            "replay.max_lag: a chunk may be 2 steps old when it is trained on first; give more than 2",
        ),
    ],
)
def test_what_cannot_be_trained_on_again_is_refused(changes, message):
    spec = parse_spec(scripted_spec(**changes))
    with pytest.raises(SpecError, match=message):
        check_spec(spec, training=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"uses": 0}, "uses"),
        ({"uses": 2, "capacity": 0}, "capacity"),
        ({"uses": 1, "capacity": 8}, "uses: 'uses' must be >= 2"),
        ({"max_lag": 3}, "replay.uses: required, but missing"),
        ({"uses": 2, "sampling": "oldest"}, "sampling: unknown key; now a capacity alone"),
    ],
)
def test_nonsense_is_refused(settings, message):
    with pytest.raises(SpecError, match=message):
        parse_spec(scripted_spec(**GIPO, asynchrony={"replay": settings}))


# ------------------------------------------------------------------------------------------------------------ memory


def test_memory_is_known_before_the_first_ticket():
    info = synthetic.env_info(cameras=2, pixels=224, state_dim=8)
    task = evolve(info.tasks[0], max_steps=192)
    info = evolve(info, tasks=(task,))
    spec = parse_spec(
        scripted_spec(
            algorithm={"type": "gipo"},
            rollout={"chunk": 4, "episodes": 512, "group_size": 1},
            asynchrony={"max_lag": 1, "replay": {"uses": 3}},
        )
    )
    sample = 2 * 224 * 224 * 3 + 4 * 8
    assert RunShape.from_spec(spec).groups_held == 2 * 512 + 2 * 512
    assert trajectory_bytes(spec, info, sample) == 49 * sample == pytest.approx(14.7e6, rel=0.01)
    plan = Plan(slots=(Slot(roles=("sim", "policy")), Slot(roles=("learner",)), Slot(roles=("learner",))))
    enough = 2048 * 49 * sample
    check_memory(spec, plan, Cluster(cpus=8, gpus=0, memory=enough), info, sample)
    with pytest.raises(UserError, match=r"2048 trajectories .* 14.1 MiB each: 28.1 GiB .* 28.1 GiB; lower .*capacity"):
        check_memory(spec, plan, Cluster(cpus=8, gpus=0, memory=enough - 1), info, sample)
    nodes = (Node(name="a", cpus=4, gpus=0, memory=enough // 2), Node(name="b", cpus=4, gpus=0, memory=enough // 4))
    there = Cluster(cpus=8, gpus=0, memory=enough, nodes=nodes)
    check_memory(spec, plan, there, info, sample)
    on_b = evolve(plan, slots=(plan.slots[0], *(evolve(slot, node="b") for slot in plan.slots[1:])))
    with pytest.raises(UserError, match="on node 'b'"):
        check_memory(spec, on_b, there, info, sample)


def test_a_run_that_does_not_fit_ends_before_it_plays(train, monkeypatch):
    monkeypatch.setattr(LocalBackend, "cluster_resources", lambda self: Cluster(cpus=2, gpus=0, memory=5000))
    with pytest.raises(UserError, match="32 trajectories may be on the learners at once"):
        train(**GIPO, **replaying(2), eval=SHORT)
    with pytest.raises(UserError, match="16 trajectories .* lower rollout.episodes, or the pixels"):
        train("once", **GIPO, eval=SHORT, train={"steps": 1})


# --------------------------------------------------------------------------------------------------------------- Ray

APART = {"runtime": {"backend": "ray"}, "placement": {"type": "disaggregated"}}


def work_in(folder, name):
    """(start, end) of these calls in the trace, in the order of their starts."""
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    found = [e for e in trace if e["ph"] == "X" and e["name"] == name and e["pid"]]
    return sorted((e["pid"], e["ts"], e["ts"] + e["dur"]) for e in found)


@pytest.mark.ray
def test_heavy_parts_come_while_the_learner_trains(train, tmp_path):
    """And the run is that of one process, to the bit, where each trajectory is trained on twice."""
    steps = {"train": {"steps": 5}, "model": {"type": "linear", "learn_latency_s": 0.02}, **GIPO}
    _, expected = train("simulated", **{**steps, "rollout": {"group_size": 1, "lag": 1}}, **replaying(2))
    asynchrony = {"max_lag": {"pinned": 1}, "replay": {"uses": 2}}
    slow = {"env": {"num_envs": 6, "latency_s": 0.004, "latency_sigma": 1.0}}
    results, got = train("asynchronous", asynchrony=asynchrony, **steps, **slow, **APART)
    losses = [[line.get("loss/total") for line in steps_of(lines)] for lines in (expected, got)]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    played = [sum(line["rollout/env_steps"] for line in steps_of(lines)) for lines in (expected, got)]
    assert played[0] == played[1], "what is played while the learner trains counts too"
    assert [line["policy/lag_max"] for line in steps_of(got)] == [0, 1, 2, 2, 2]
    assert results["replay"]["reused"] == 4 * 16
    updates, came = (work_in(tmp_path / "asynchronous", name) for name in ("update", "receive"))
    assert len(updates) == 5 and {pid for pid, _, _ in came} == {updates[0][0]}
    for _, begin, end in updates[:-1]:
        assert any(begin <= start and stop <= end for _, start, stop in came), "while it trains, for the next step"


@pytest.mark.ray
def test_ranks_change_no_number(train):
    """Samples stay with the learner that trained on them first, and each gets equally many."""
    changes = {**GIPO, "train": {"steps": 4}, "rollout": {"group_size": 1, "lag": 1}, "eval": SHORT}
    _, expected = train("one", **changes, **replaying(2))
    two = {"runtime": {"backend": "ray"}, "placement": {"type": "slots", "learner": 2}}
    _, got = train("two", **changes, **replaying(2), **two)
    for before, after in zip(steps_of(expected), steps_of(got), strict=True):
        assert after["update/samples"] == before["update/samples"]
        for name in ("loss/total", "replay/share", "value/explained_variance"):
            assert after[name] == pytest.approx(before[name], abs=LOSS_APART), name
        assert after["replay/mib"] >= before["replay/mib"] > 0
