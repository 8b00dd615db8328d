"""What a rollout is made of: further rounds, weights of the past, values of today, a reference; and the end of a run in
which nothing is left to train on."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attrs import evolve
from scripted_runs import advance, finish, heavy_of, play, prepared, scripted_spec, weights_of
from transfer_ends import layout_of, stored

from updates import policy_gradient
from vla_rl.core.capabilities import HasReference
from vla_rl.core.catalogue import build
from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.errors import UserError
from vla_rl.core.run.selection import Selection
from vla_rl.core.spec.sections import TrainSpec
from vla_rl.core.spec.spec import SpecError, make_component, parse_spec
from vla_rl.core.types import Chunk
from vla_rl.plugins.engines.torch.engine import TorchEngine
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.comm.weight_transfer.connect import open_sender
from vla_rl.runtime.driver.collecting.assembler import assemble_rollout
from vla_rl.runtime.driver.samples.sample_router import rescore_rollout
from vla_rl.runtime.messages.reports import TrajectoryResult
from vla_rl.runtime.messages.requests import EnvTrajectory, PolicyMode, StepRequest
from vla_rl.runtime.start import start
from vla_rl.runtime.workers.learner.learner import Learner
from vla_rl.runtime.workers.policy.policy_worker import PolicyWorker
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel

IMPOSSIBLE = {"length": 9, "max_steps": 8}
PPO = {"group_size": 1, "episodes": 16}
SHORT = {"before": False, "episodes_per_task": 1}


ACTING = PolicyMode(purpose="action", greedy=False, keep=True)


def request(obs, *, positions, numbers, versions):
    """What a lane asks for, at the first chunk of episodes, that has nothing else to say."""
    asking = np.stack([positions, numbers, numbers, 0 * numbers, 0 * numbers, versions])
    nothing = {"finished": (), "again": (), "steps": 0, "ending": 0, "waiting": 0, "seconds": 0.0, "env_steps": 0}
    return StepRequest(asking=asking, obs=obs, ended=np.zeros((2, 0), np.int64), final=None, **nothing)


def learner_of(model, algorithm):
    """A learner without any others."""
    settings = make_component("algorithm", algorithm).config
    judge = build("algorithm", algorithm, settings, AlgorithmContext(chunk=2))
    train = TrainSpec(steps=1, lr=1e-2, micro_batch=4)
    about = {"name": "linear", "device": "cpu", "world": 1, "info": synthetic.env_info(), "acting": False}
    return Learner(model, policy_gradient(judge), train, **about, heartbeat=lambda: None)


class Alone:
    """The fleet, as far as learners are asked something, of one."""

    def __init__(self, learner):
        self.learners = [SimpleNamespace(call=lambda method, *arguments: getattr(learner, method.__name__)(*arguments))]
        self.get_all = list


@contextmanager
def runtime(**changes):
    made = start(parse_spec(scripted_spec(**changes)))
    try:
        yield made
    finally:
        made.workers.close()


# ------------------------------------------------------------------------------------------------- further rounds


def test_filtered_groups_are_replaced_until_enough_survive():
    narrow = {"type": "grpo", "filter": {"lower": 0.3, "upper": 0.7}}
    with runtime(algorithm=narrow) as made:
        plain, _ = play(made, 1)
        few = len(plain.groups[made.algorithm.select(plain)].unique())
    assert 0 < few < 4
    with runtime(algorithm=narrow, rollout={"resample": {"max_rounds": 8}}) as made:
        rollout, metrics = play(made, 1)
        keep = made.algorithm.select(rollout)
        played = rollout.valid.shape[1]
        assert 16 < played < 16 + 8 * 8 and played % 4 == 0
        kept = rollout.groups[keep].unique()
        assert len(kept) == 4 and kept.max() == rollout.groups.max(), "not one group more than that takes"
        assert torch.equal(rollout.groups[:16], plain.groups) and torch.equal(rollout.rewards[:, :16], plain.rewards)
        Selection(made.spec).choose_columns(rollout, keep, metrics)
        assert metrics["groups/kept"] == 4 and metrics["groups/filtered"] == played / 4 - 4


def test_resampling_is_capped():
    with runtime(env=IMPOSSIBLE, rollout={"resample": {"max_rounds": 2}}) as made:
        rollout, metrics = play(made, 1)
        assert rollout.valid.shape[1] == 16 + 2 * 8
        assert metrics["rollout/episodes"] == 32


def test_a_run_with_resampling_trains(train):
    algorithm = {"type": "grpo", "filter": {"lower": 0.3, "upper": 0.7}}
    _, metrics = train(algorithm=algorithm, rollout={"resample": {"max_rounds": 2}}, train={"steps": 2}, eval=SHORT)
    steps = [line for line in metrics if "groups/kept" in line]
    assert len(steps) == 2 and max(line["groups/kept"] for line in steps) <= 4
    assert any(line["rollout/episodes"] > 16 for line in steps)


def test_resampling_needs_groups():
    with pytest.raises(UserError, match="algorithm 'ppo' has none"):
        spec = scripted_spec(algorithm={"type": "ppo"}, rollout={**PPO, "resample": {"max_rounds": 1}})
        check_spec(parse_spec(spec), training=True)
    rollout = {"episodes": None, "auto_reset": {"steps": 8}, "resample": {"max_rounds": 1}}
    with pytest.raises(SpecError, match="resample: has no effect with auto_reset, which has no groups"):
        parse_spec(scripted_spec(rollout=rollout))


def test_a_run_without_signal_stops_and_says_what_the_groups_did(train):
    with pytest.raises(UserError) as error:
        train(env=IMPOSSIBLE, train={"steps": 9, "max_skipped": 3}, eval=SHORT)
    assert (
        "nothing to train on in 3 training steps in a row (train.max_skipped):\n  0 of 4 succeeded: 12 groups\n"
        in str(error.value)
    )
    assert "bc_warmup:" in str(error.value)


def test_only_steps_in_a_row_count():
    spec = parse_spec(scripted_spec(train={"max_skipped": 2}))
    with runtime() as made:
        rollout, _ = play(made, 1)
    selection, none, everything = Selection(spec), torch.zeros(16, dtype=torch.bool), torch.ones(16, dtype=torch.bool)
    for keep in (none, everything, none):
        selection.choose_columns(rollout, keep, {})
        selection.check_progress()
    selection.choose_columns(rollout, none, {})
    with pytest.raises(UserError, match="2 training steps"):
        selection.check_progress()


# -------------------------------------------------------------------------------------------------- an old policy


def test_a_lag_acts_with_the_weights_of_the_past():
    """Rollout 4 with lag 2 is made by version 1, to the bit what a run of one update would play."""
    seen = {}
    with runtime(algorithm={"type": "ppo"}, rollout={**PPO, "lag": 2}) as made:
        for step in range(1, 5):
            before = weights_of(made)
            rollout, _ = play(made, step)
            after = weights_of(made)
            assert all(torch.equal(after[name], before[name]) for name in before)
            seen[step] = rollout
            if step < 4:
                made.learners.train(prepared(made, rollout), made.algorithm.advantages(rollout))
            finish(made, trained=step < 4)
    assert [seen[step].versions.max().item() for step in seen] == [0, 0, 0, 1]
    with runtime(algorithm={"type": "ppo"}, rollout=PPO) as made:
        advance(made, 1)
        for step in (2, 3):
            play(made, step)
            finish(made, trained=False)
        wanted, _ = play(made, 4)
    assert torch.equal(seen[4].log_probs, wanted.log_probs) and torch.equal(seen[4].rewards, wanted.rewards)


def test_a_lag_is_measured_and_survives_a_restart(train):
    changes = {"algorithm": {"type": "gipo"}, "rollout": {**PPO, "lag": 1}, "eval": SHORT}
    _, whole = train("whole", **changes, train={"steps": 3, "epochs": 1})
    lags = [line["policy/lag_max"] for line in whole if "policy/lag_max" in line]
    assert lags == [0, 1, 1]
    train("parts", **changes, train={"steps": 2, "epochs": 1})
    _, parts = train("parts", resume=True, **changes, train={"steps": 3, "epochs": 1})

    def last(lines):
        return next(line for line in lines if line["step"] == 3 and "loss/total" in line)

    assert last(parts) == last(whole)


def sender_to(policy):
    """The learner's end of a transfer through the object store, whose arrays the caller passes on."""
    transfer = stored(layout_of(policy.engine.model.weights()))
    policy.connect_learner(transfer)
    return open_sender(transfer, torch.device("cpu"), None)


def test_a_policy_acts_with_the_version_that_a_ticket_asks_for():
    """A policy in a separate process: it is sent weights, keeps two older versions, and holds the newest again."""
    model = LinearModel(synthetic.env_info(), 2)
    donor = LinearModel(synthetic.env_info(), 2)
    policy = PolicyWorker(TorchEngine(model), name="linear", seed=0, lag=2)
    sender = sender_to(policy)
    start = [(name, tensor.clone()) for name, tensor in model.weights()]

    def at(version):
        return [(name, tensor + version) for name, tensor in start]

    def acting(version):
        obs, first = synthetic.observation(synthetic.env_info(), 1), np.array([0])
        policy.act(ACTING, (0,), request(obs, positions=first, numbers=first, versions=np.array([version])))
        return used.pop()

    used = []
    sample = model.sample_chunk

    def sampled(*arguments):
        used.append((policy.version, [tensor.clone() for _, tensor in model.weights()]))
        return sample(*arguments)

    model.sample_chunk = sampled
    assert acting(0)[0] == 0
    for version, old in ((1, 0), (2, 0), (3, 1), (4, 2)):
        donor.load_weights(at(version))
        policy.load(version, sender.send_version(donor.weights(), False)[0])
        acted, tensors = acting(old)
        assert acted == old and policy.version == version
        for (_, wanted), (_, newest), tensor, now in zip(at(old), at(version), tensors, model.weights(), strict=True):
            assert torch.equal(tensor, wanted) and torch.equal(now[1], newest)


@pytest.mark.parametrize("advantage", ["chunk", "action"])
def test_values_are_those_of_the_current_critic(advantage):
    """With a lag, GIPO sees the values that the newest weights give, and PPO those of acting."""
    fixed = {"episodes": None, "auto_reset": {"steps": 8}, "group_size": 1, "ignore_terminations": True}
    found = {}
    for name in ("gipo", "ppo"):
        algorithm = {"type": name, "advantage": advantage, "time_limit": "bootstrap"}
        with runtime(algorithm=algorithm, rollout={**fixed, "lag": 1}, env={"length": 3}, train={"lr": 0.1}) as made:
            advance(made, 1)
            rollout = prepared(made, play(made, 2)[0])
            heavy = heavy_of(made, rollout)
            model = LinearModel(made.info, 2, values=advantage)
            model.load_weights(weights_of(made).items())
            now = model.values(heavy.obs).reshape(rollout.values.shape)
            found[name] = (rollout.values, now, rollout.next_values)
    values, now, ends = found["gipo"]
    torch.testing.assert_close(values, now)
    assert bool((ends != 0).any())
    values, now, old_ends = found["ppo"]
    assert not torch.allclose(values, now, atol=1e-4)
    assert torch.equal(ends != 0, old_ends != 0) and not torch.allclose(ends, old_ends, atol=1e-4)


def test_values_of_the_newest_weights_are_not_computed_twice(monkeypatch):
    def refuse(self, *arguments):
        raise AssertionError("revalued")

    monkeypatch.setattr("vla_rl.runtime.workers.learner.learner.Learner.score_samples", refuse)
    with runtime(algorithm={"type": "gipo"}, rollout=PPO) as made:
        advance(made, 1)
        prepared(made, play(made, 2)[0])


# ------------------------------------------------------------------------------------- log-probs of the newest weights

CORRECTIONS = [
    {"type": "ppo", "correction": {"type": "decoupled", "threshold": 2.0}},
    {"type": "ppo", "correction": {"type": "decoupled", "proximal": "interpolate"}},
    {"type": "ppo", "correction": {"type": "truncated"}, "advantage": "action"},
    {"type": "ppo", "correction": {"type": "v-trace"}, "lam": 1.0},
    {"type": "grpo", "correction": {"type": "decoupled"}},
    {"type": "grpo", "correction": {"type": "truncated", "proximal": "interpolate"}},
]


def played_under_a_lag(made):
    """-> (the rollout of version 0 when the newest is 1, its scores by the newest, [T, N, ...])."""
    advance(made, 1)
    rollout = prepared(made, play(made, 2)[0])
    heavy = heavy_of(made, rollout)
    model = LinearModel(made.info, 2, values="chunk")
    model.load_weights(weights_of(made).items())
    chunk = Chunk(actions=heavy.actions, log_probs=None, extras=heavy.extras)
    scores = model.chunk_log_probs(heavy.obs, chunk)
    shape = rollout.samples.shape
    return rollout, scores.log_probs.detach().unflatten(0, shape), scores.values.detach().unflatten(0, shape)


def test_proximal_log_probs_are_those_of_the_newest_weights():
    changes = {"env": {"length": 3}, "train": {"lr": 0.1}}
    fixed = {"episodes": None, "auto_reset": {"steps": 8}, "group_size": 1, "ignore_terminations": True}
    with runtime(
        algorithm={"type": "ppo", "correction": {"type": "v-trace"}}, rollout={**fixed, "lag": 1}, **changes
    ) as made:
        rollout, log_probs, values = played_under_a_lag(made)
        assert rollout.versions.max() == 0 and made.fleet.version == 1
        torch.testing.assert_close(rollout.proximal_log_probs, log_probs)
        assert float((rollout.proximal_log_probs - rollout.log_probs).abs().max()) > 0.05
        torch.testing.assert_close(rollout.values, values)  # V-trace needs these too
        metrics = made.learners.train(rollout, made.algorithm.advantages(rollout))
        first = rollout.proximal_log_probs - rollout.log_probs
        assert metrics["policy/behaviour_weight_p95"] == pytest.approx(float(first.exp().quantile(0.95)), rel=0.05)


def without_scoring(monkeypatch):
    """-> how many chunks were scored without gradient, each time."""
    score, counts = LinearModel.chunk_log_probs, []

    def counted(self, obs, chunk):
        if not torch.is_grad_enabled():
            counts.append(len(obs))
        return score(self, obs, chunk)

    monkeypatch.setattr(LinearModel, "chunk_log_probs", counted)
    return counts


def test_what_the_newest_weights_chose_is_not_scored_again(monkeypatch):
    counts = without_scoring(monkeypatch)
    for lag in (0, 1):
        assert not counts
        with runtime(
            algorithm={"type": "ppo", "correction": {"type": "decoupled"}}, rollout={**PPO, "lag": lag}
        ) as made:
            advance(made, 1)
            rollout = prepared(made, play(made, 2)[0])
            assert torch.equal(rollout.proximal_log_probs, rollout.log_probs) == (lag == 0)
    assert sum(counts) == rollout.samples.sum()
    with runtime(algorithm={"type": "ppo"}, rollout={**PPO, "lag": 1}) as made:
        assert prepared(made, play(made, 1)[0]).proximal_log_probs is None


def test_a_round_of_two_versions_is_scored_where_it_is_old(monkeypatch):
    """New weights come between two chunk steps, after which one of three rows has ended its episode."""
    counts = without_scoring(monkeypatch)
    info = synthetic.env_info()
    model, donor = LinearModel(info, 2), LinearModel(info, 2, seed=1)
    policy = PolicyWorker(TorchEngine(model), name="linear", seed=0)
    sender = sender_to(policy)
    obs = synthetic.observation(info, 3)

    def act(rows):
        rows = np.array(rows)
        policy.act(ACTING, (0,), request(obs.take(rows), positions=rows, numbers=rows, versions=0 * rows - 1))

    act([0, 1, 2])
    policy.load(1, sender.send_version(donor.weights(), False)[0])
    act([0, 2])
    played = []
    for number, length in enumerate([2, 1, 2]):
        flags = {name: np.zeros((length, 2), bool) for name in ("terminated", "truncated")}
        light = {"rewards": np.zeros((length, 2), np.float32), "valid": np.ones((length, 2), bool), **flags}
        ended = EnvTrajectory(number=number, record=light, episodes=(), frames=None)
        played.append((0, TrajectoryResult(env_part=ended, policy_part=policy.ticket_results([ended], False)[0])))
    gathered = assemble_rollout(1, played, 1)
    recorded, none_chosen = gathered.rollout.log_probs, np.zeros(3, bool)
    learner = learner_of(donor, "grpo")
    (sample_ids,) = gathered.ids_by_worker().values()
    learner.buffer.add(0, policy.samples.sample_batches(np.sort(sample_ids)))
    chosen = evolve(gathered, ranks=0 * gathered.sample_ids)
    proximal = rescore_rollout(
        Alone(learner), chosen, values=none_chosen, log_probs=~none_chosen, version=1, size=None
    ).proximal_log_probs
    assert counts == [3] and gathered.rollout.samples.sum(0).tolist() == [2, 1, 2]
    assert torch.equal(proximal[1], recorded[1]) and not torch.isclose(proximal[0], recorded[0], atol=1e-4).all()
    tokens = policy.samples.inferences[0].inputs.extras["tokens"]
    wanted = donor.chunk_log_probs(obs, Chunk(actions=None, log_probs=None, extras={"tokens": tokens})).log_probs
    np.testing.assert_allclose(proximal[0], wanted.detach(), rtol=1e-6)
    policy.release_tickets([0, 1])
    assert sorted(policy.samples.tickets) == [2] and sorted(policy.samples.inferences) == [0, 1]
    policy.release_tickets([2])
    assert not policy.samples.tickets and not policy.samples.inferences


@pytest.mark.parametrize("algorithm", CORRECTIONS[:3], ids=lambda a: "-".join(map(str, a.values())))
def test_a_run_without_lag_is_not_changed_by_a_correction(train, algorithm):
    """To the bit, in every metric of every step, over several optimiser steps a version."""
    changes = {"rollout": PPO, "eval": SHORT}
    plain = {name: value for name, value in algorithm.items() if name in ("type", "advantage")}
    _, wanted = train("plain", algorithm=plain, train={"steps": 3}, **changes)
    _, found = train("corrected", algorithm=algorithm, train={"steps": 3}, **changes)
    for before, after in zip(wanted, found, strict=True):
        assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("algorithm", CORRECTIONS, ids=lambda a: "-".join(map(str, a.values())))
def test_a_run_under_a_lag_is_corrected(train, algorithm):
    rollout = {"lag": 1} if algorithm["type"] == "grpo" else {**PPO, "lag": 1}
    plain = {name: value for name, value in algorithm.items() if name in ("type", "advantage", "lam")}
    lines = {}
    for name, chosen in (("plain", plain), ("corrected", algorithm)):
        _, metrics = train(name, algorithm=chosen, rollout=rollout, train={"steps": 3, "lr": 0.1}, eval=SHORT)
        lines[name] = [line for line in metrics if "loss/total" in line]
    plain, corrected = lines["plain"], lines["corrected"]
    assert corrected[0]["loss/total"] == plain[0]["loss/total"] and corrected[1] != plain[1]
    assert [line["policy/lag_max"] for line in corrected] == [0, 1, 1]
    assert [line["policy/behaviour_weight_abs_log_p95"] > 0.02 for line in corrected] == [False, True, True]


# ---------------------------------------------------------------------------------------------- a reference policy


def test_a_model_without_a_reference_is_refused_before_training():
    with pytest.raises(
        UserError, match=r"reference \(algorithm.kl\).* model 'linear' has none.*set algorithm.kl: null"
    ):
        start(parse_spec(scripted_spec(algorithm={"type": "grpo", "kl": {"coef": 0.1}})))


def test_the_reference_holds_the_policy_back(monkeypatch):
    """The reference is the first policy: a strong pull leaves the policy near it, whatever the rewards say."""

    class WithReference(LinearModel, HasReference):
        def __init__(self, *arguments, **keys):
            super().__init__(*arguments, **keys)
            self._first = copy.deepcopy(self.module)

        def reference_log_probs(self, obs, chunk):
            assert not torch.is_grad_enabled()
            first = LinearModel.__new__(LinearModel)
            first.__dict__ = {**self.__dict__, "module": self._first}
            return first.chunk_log_probs(obs, chunk).log_probs

    monkeypatch.setattr("vla_rl.testing.linear.LinearModel", WithReference)
    divergence = {}
    for coef in (1e-6, 10.0):
        with runtime(algorithm={"type": "grpo", "kl": {"coef": coef, "estimator": "k3"}}) as made:
            for step in (1, 2, 3):
                _, metrics = advance(made, step)
            divergence[coef] = metrics["policy/kl_reference"]
    assert 0 <= divergence[10.0] < 0.6 * divergence[1e-6]
