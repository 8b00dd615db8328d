"""Learners that begin before a step is whole: the same weights and metrics, or a refusal."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch
from attrs import frozen
from scripted_runs import advance, read_metrics, scripted_spec, weights_in, weights_of

from vla_rl.core.declarations import AlgorithmPlugin
from vla_rl.core.errors import PluginError, SpecError, UserError
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.manager import hookimpl
from vla_rl.core.run.flow import Ledger
from vla_rl.core.run.loop import flow_of
from vla_rl.core.run.state import State
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import Advantages, AdvantageScope, Loss
from vla_rl.runtime.checks.run import check_spec
from vla_rl.runtime.driver.collecting.rollouts import StepRollouts
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.planning.profile import from_trace
from vla_rl.runtime.start import run, start
from vla_rl.runtime.workers.learner.learner import Learner

LOTTERY = Path(__file__).parents[3] / "plugins" / "test_combinations.py"
APART = {"runtime": {"backend": "ray"}, "placement": {"type": "slots"}}
STREAM = {"asynchrony": {"streaming_update": True}}
UNNORMALISED = {"normalize_advantages": None}
EPS = 1e-3
"""It keeps gradients that are 0 but for rounding from making full steps."""
LENGTHS = {"length_sigma": 0.5, "length": 6, "max_steps": 24}
"""Trajectories of 1 to 12 chunk steps."""


class Parts(list):
    """`held`: tickets that were played, and have not come in."""

    def __init__(self):
        self.held = []


@pytest.fixture
def piecemeal(monkeypatch):
    """Tickets come in one by one, about in the order of their numbers. -> samples of each part that learners trained
    on, filled by runs."""
    wait, forward_backward, random = StepRollouts.wait, Learner.forward_backward, Random(0)
    parts = Parts()
    held = parts.held

    def one(self, needed):
        if not held:
            held.extend(sorted(wait(self, needed), key=lambda number: -number - random.uniform(0, 6)))
        return [held.pop()]

    def counted(self, version, refs, fields, micro_batches, passes, first):
        parts.append(sum(map(len, micro_batches)))
        return forward_backward(self, version, refs, fields, micro_batches, passes, first)

    monkeypatch.setattr(StepRollouts, "wait", one)
    monkeypatch.setattr(Learner, "forward_backward", counted)
    return parts


def changed(changes):
    """Return the changes to a spec whose optimiser steps have all samples."""
    given = {"env": LENGTHS, **changes}
    train = {"global_batch": None, "epochs": 1, "steps": 3, "max_grad_norm": 0.02, "adam_eps": EPS}
    return {**given, "train": {**train, **given.get("train", {})}}


AHEAD = ("rollout/env_steps", "rollout/ready_tickets", "rollout/running_tickets", "rollout/mixed_versions")
"""What metrics say of tickets of later steps too."""


def same(folder, other, names=("whole", "streamed"), tolerance=2e-6):
    """Weights and metrics of two runs."""
    expected, got = (weights_in(folder / name) for name in names)
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    for found, expected_line in zip(other, read_metrics(folder / names[0]), strict=True):
        repeats = found.pop("eval/repeats", None), expected_line.pop("eval/repeats", None)
        line, wanted = (
            {k: v for k, v in of.items() if k not in AHEAD and "/policy_lag_" not in k} for of in (found, expected_line)
        )
        shares = [metrics.pop("update/weights_changed", 0.0) for metrics in (line, wanted)]
        # A weight whose gradient is rounding alone may move in one of the runs.
        assert shares[0] == pytest.approx(shares[1], abs=0.05)
        assert repeats[0] == repeats[1] and line == pytest.approx(wanted, rel=1e-4, abs=2e-6)


CASES = {
    "grpo": {"algorithm": {"type": "grpo"}},
    "grpo, chunks": {"algorithm": {"type": "grpo", "log_prob": "chunk", "aggregation": "step-mean"}},
    "entropy": {"algorithm": {"type": "grpo", "entropy_coef": 0.01}},
    "epochs": {"algorithm": {"type": "grpo"}, "train": {"epochs": 2}},
    "resample": {"algorithm": {"type": "grpo"}, "rollout": {"resample": {"max_rounds": 2}}},
    "corrected": {"algorithm": {"type": "grpo", "correction": {"type": "decoupled"}}, "rollout": {"lag": 1}},
    "ppo": {"algorithm": {"type": "ppo", **UNNORMALISED}},
    "ppo, actions": {"algorithm": {"type": "ppo", "advantage": "action", "log_prob": "action", **UNNORMALISED}},
    "ppo, trajectories": {"algorithm": {"type": "ppo", "aggregation": "trajectory-mean", **UNNORMALISED}},
    "ppo, epochs": {"algorithm": {"type": "ppo", **UNNORMALISED}, "train": {"epochs": 2, "value_lr": 1e-2}},
    "critic first": {"algorithm": {"type": "ppo", **UNNORMALISED}, "train": {"critic_warmup_steps": 2}},
    "segments": {
        "algorithm": {"type": "ppo", **UNNORMALISED},
        "rollout": {"auto_reset": {"steps": 8}, "episodes": None, "group_size": 1},
    },
    "v-trace": {"algorithm": {"type": "ppo", "correction": {"type": "v-trace"}, **UNNORMALISED}, "rollout": {"lag": 2}},
    "gipo": {"algorithm": {"type": "gipo", "behaviour_kl_coef": 0.1, **UNNORMALISED}, "rollout": {"lag": 1}},
}


@pytest.mark.parametrize("name", CASES)
def test_streamed_is_whole(train, tmp_path, piecemeal, name):
    """Whatever comes in first; gradients are clipped."""
    changes = changed(CASES[name])
    train("whole", **changes)
    assert not piecemeal
    _, got = train("streamed", **STREAM, **changes)
    steps = [line for line in got if "update/samples" in line]
    assert len(piecemeal) >= 2 * len(steps) and sum(piecemeal) == sum(line["update/samples"] for line in steps)
    assert sum(count % 8 == 0 for count in piecemeal) >= len(piecemeal) - len(steps), "all but the last are full"
    assert min(line["policy/grad_norm"] for line in steps) > 0.02, "gradients are clipped"
    same(tmp_path, got)


def test_a_real_model(tmp_path, piecemeal):
    """The model's critic and policy share a network."""
    spec = {
        "name": "stream",
        "plugins": [str(LOTTERY)],
        "model": {"type": "pi0", "preset": "tiny", "cameras": ["wrist"], "denoise_steps": 2},
        "env": {"type": "tabletop", "num_envs": 8, "tasks": ["pick_red"]},
        "rollout": {"chunk": 4, "episodes": 8, "max_steps": 12},
        "algorithm": {"type": "ppo", **UNNORMALISED},
        "runtime": {"backend": "local"},
        "train": {"steps": 1, "lr": 1e-3, "micro_batch": 4, "adam_eps": EPS},
        "eval": {"before": False, "episodes_per_task": 1},
        "hooks": [{"type": "jsonl"}],
    }
    run(parse_spec(spec), tmp_path / "whole", False)
    run(parse_spec(spec | STREAM), tmp_path / "streamed", False)
    assert len(piecemeal) > 1
    same(tmp_path, read_metrics(tmp_path / "streamed"), tolerance=5e-6)


@hookimpl(wraps="env")
def chunk_step():
    """The simulators of one process die, once, at the step that the environment variable gives."""
    file, Dying.steps = os.environ.get("SIMULATORS_DIE"), Dying.steps + 1
    if file and Dying.steps == 40:
        with suppress(FileExistsError):
            os.close(os.open(file, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)
    return (yield)


class Dying:
    steps = 0
    """Env steps in this process."""


@pytest.mark.ray
@pytest.mark.own_ray  # its processes get this test's environment variables
def test_learners_train_while_tickets_are_played(train, tmp_path, monkeypatch):
    """Two of them, a sim worker is killed meanwhile, and the trace shows it."""
    monkeypatch.setenv("SIMULATORS_DIE", str(tmp_path / "died"))
    changes = changed({"algorithm": {"type": "ppo", **UNNORMALISED}, "train": {"micro_batch": 4, "max_grad_norm": 1.0}})
    train("whole", **changes)
    changes["plugins"] = [__file__, "vla_rl.testing.scripted", "vla_rl.testing.slot_placement"]
    apart = {"runtime": {"backend": "ray"}, "placement": {"type": "slots", "learner": 2, "policy": 2, "sim": 2}}
    uneven = {"env": {**LENGTHS, "num_envs": 4, "latency_s": 0.03, "latency_sigma": 0.5}}
    _, got = train("streamed", **{**changes, **STREAM, **apart, **uneven})
    same(tmp_path, got, tolerance=1e-5)
    assert (tmp_path / "died").exists()
    data = json.loads((tmp_path / "streamed" / "trace.json").read_text())
    trace, worked = data["traceEvents"], 0.0
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in trace if e.get("cat") == "iteration"}
    for step in (1, 2, 3):
        begin, end = spans[f"training {step}"]
        calls = [e for e in trace if e.get("cat") == "work" and begin <= e["ts"] < end]
        played = max(e["ts"] for e in calls if e["name"] == "step")
        for rank in (5, 6):
            fed = [e for e in calls if e["name"] == "forward_backward" and e["pid"] == rank]
            assert len(fed) > 2 and fed[0]["ts"] < played
            update = next(e for e in calls if e["name"] == "update" and e["pid"] == rank)
            assert fed[-1]["ts"] < update["ts"]
            worked += (step > 1) * (update["dur"] + sum(e["dur"] for e in fed)) / 1e6
    assert from_trace(data).learner.mean == pytest.approx(worked / 4), "for a forecast: all of it, of a rank and step"


@pytest.mark.ray
def test_ahead_and_streamed(train, tmp_path):
    """What was played ahead is begun with at once, with values of the newest critic."""
    changes = changed({"algorithm": {"type": "gipo", **UNNORMALISED}, "train": {"max_grad_norm": 1.0, "steps": 4}})
    train("whole", rollout={"lag": 1}, **changes)
    asynchrony = {"asynchrony": {"max_lag": {"pinned": 1}, "streaming_update": True}}
    uneven = {"env": {**LENGTHS, "num_envs": 6, "latency_s": 0.004, "latency_sigma": 1.0}}
    _, got = train("streamed", **{**changes, **asynchrony, **APART, **uneven})
    same(tmp_path, got, tolerance=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"type": "ppo"}}, "'ppo' needs the whole step .* set algorithm.normalize_advantages: null, or"),
        (
            {"algorithm": {"type": "gipo", "aggregation": "rlinf", **UNNORMALISED}},
            "rlinf weighs by its longest .* step-mean",
        ),
        ({"algorithm": {"type": "grpo", "aggregation": "rlinf"}}, "rlinf weighs by its longest trajectory"),
        ({"algorithm": {"type": "srpo", "encoder": "tiny"}}, "compared with all successes of the step; choose grpo"),
        (
            {"algorithm": {"type": "secretive"}},
            "'secretive' needs the whole step .*: its advantage_scope is STEP; choose",
        ),
        ({"algorithm": {"type": "explained"}}, "'explained' needs the whole step .*: all scores are ranked, or asynch"),
        ({"train": {"global_batch": 16}}, "train.global_batch: with asynchrony.streaming_update .* remove it, or"),
        ({"train": {"mini_batches": 2}}, "train.mini_batches: with asynchrony.streaming_update .* remove it, or"),
        ({"runtime": {"backend": "ray"}}, "learners share workers with .*use `placement: {type: disaggregated}`"),
        ({"placement": {"type": "collocated", "offload": {"learner": True}}}, "leave out placement.offload, or"),
    ],
)
def test_what_needs_the_whole_step_is_refused(changes, message):
    base = {"plugins": [__file__, "vla_rl.testing.scripted"], "placement": {"type": "collocated"}}
    spec = parse_spec(scripted_spec(**changed({**base, **changes}), **STREAM))
    with pytest.raises(SpecError, match=message):
        check_spec(spec, training=True)
    check_spec(parse_spec(scripted_spec(**changed({**base, **changes}))), training=True)


def test_needs_in_words_are_refused_with_the_line_to_write():
    spec = parse_spec(
        scripted_spec(**changed({"algorithm": {"type": "words"}, "plugins": [__file__, "vla_rl.testing.scripted"]}))
    )
    message = (
        r"algorithm 'words' \(.*test_streaming_update.py:\d+\): needs: .*; write `needs = Requirements\(groups=True\)`"
    )
    with pytest.raises(SpecError, match=message):
        check_spec(spec, training=True)
    with pytest.raises(PluginError, match=message):
        build_algorithm(spec)


def test_one_process_is_not_refused():
    check_spec(parse_spec(scripted_spec(**changed({}), **STREAM)), training=True)


class Step(Algorithm):
    def advantages(self, rollout):
        valid = rollout.valid.float()
        return Advantages(advantages=valid, weights=valid)

    def loss(self, scores, batch):
        total = -(scores.log_probs.sum(-1) * batch.advantages * batch.weights).sum()
        return Loss(total=total, metrics={"loss/policy": total.detach()})


class Explained(Step):
    scope_reason = "all scores are ranked"


class Words(Step):
    needs = frozenset({"groups"})


class Group(Step):
    advantage_scope = AdvantageScope.GROUP


class Centred(Group):
    """By the mean of all."""

    def advantages(self, rollout):
        scores, valid = rollout.rewards.sum((0, 2)), rollout.valid.float()
        return Advantages(advantages=(scores - scores.mean())[None, :, None] * valid, weights=valid)


class Best(Group):
    def select(self, rollout):
        scores = rollout.rewards.sum((0, 2))
        return scores >= scores.mean()


class Squared(Group):
    def loss(self, scores, batch):
        total = (scores.log_probs.sum(-1) * batch.weights).sum().square()
        return Loss(total=total, metrics={"loss/policy": total.detach()})


class Broken(Group):
    """Not finite in the third micro-batch."""

    calls = 0

    def loss(self, scores, batch):
        self.calls += 1
        loss = super().loss(scores, batch)
        return Loss(total=loss.total * (float("nan") if self.calls == 4 else 1.0), metrics=loss.metrics)


class Raises(Broken):
    def loss(self, scores, batch):
        if self.calls == 3:
            raise ValueError("a bug in the third loss")
        return super().loss(scores, batch)


@frozen(kw_only=True)
class Nothing:
    pass


vla_rl_plugins = {
    "algorithm": {
        name: AlgorithmPlugin(config=Nothing, build=lambda config, context, made=made: made(), summary=name)
        for name, made in {
            "secretive": Step,
            "explained": Explained,
            "words": Words,
            "group": Group,
            "centred": Centred,
            "best": Best,
            "squared": Squared,
            "broken": Broken,
            "raises": Raises,
        }.items()
    }
}


def of(algorithm, **changes):
    given = {"algorithm": {"type": algorithm}, "plugins": [__file__, "vla_rl.testing.scripted"], **changes}
    return {**changed(given), **STREAM}


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            "centred",
            "algorithm 'centred' says advantage_scope GROUP, and needs other groups: advantages of parts differ by",
        ),
        ("best", "algorithm 'best' says .*`select` keeps"),
    ],
)
def test_a_promise_that_is_not_kept_is_found_out(train, tmp_path, piecemeal, algorithm, message):
    with pytest.raises(PluginError, match=message):
        train(**of(algorithm))
    assert piecemeal


def test_a_loss_that_cannot_be_divided_is_found_out(train, piecemeal):
    with pytest.raises(PluginError, match="loss/total is not linear in the batch's weights"):
        train(**of("squared"))
    assert piecemeal


@pytest.mark.parametrize(
    ("algorithm", "error", "message"),
    [("broken", UserError, "not finite in step 1; the weights are unchanged"), ("raises", ValueError, "third loss")],
)
def test_a_part_that_fails_leaves_no_trace(piecemeal, algorithm, error, message):
    """The next step begins with zero gradients."""
    runtime = start(parse_spec(scripted_spec(**of(algorithm))))
    try:
        before = weights_of(runtime)
        with pytest.raises(error, match=message):
            advance(runtime, 1)
        learner = runtime.backend.worker.roles["learner"]
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(runtime).items())
        assert any(p.grad is not None for p in learner.trained.parameters.values())
        learner.trainers.collected._component._algorithm._component.calls = 10**6
        runtime.samples.finish_update(True)
        piecemeal.held.clear()
        runtime.flow = flow_of(runtime.spec, State(tickets=Ledger(first=16)))
        advance(runtime, 2)
        got = weights_of(runtime)
    finally:
        runtime.workers.close()
    clean = start(parse_spec(scripted_spec(**of("group"))))
    try:
        clean.flow = flow_of(clean.spec, State(tickets=Ledger(first=16)))
        advance(clean, 2)
        for name, tensor in weights_of(clean).items():
            torch.testing.assert_close(got[name], tensor)
    finally:
        clean.workers.close()


def test_steps_without_anything_to_train_on(train, piecemeal):
    """All groups are filtered: nothing is begun."""
    hopeless = {"algorithm": {"type": "grpo"}, "env": {"max_steps": 2, "length": 6}, "train": {"max_skipped": 9}}
    _, got = train(**changed(hopeless), **STREAM)
    assert not piecemeal and [line["update/skipped"] for line in got if "update/skipped" in line] == [1.0] * 3
