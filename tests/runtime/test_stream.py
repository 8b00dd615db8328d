"""Learners that begin before a step is whole: the same weights and metrics, or a refusal."""

from __future__ import annotations

import json
from functools import partial
from random import Random

import pytest
import torch
from scripted_runs import read_metrics, scripted_spec

from vla_rl.core.errors import PluginError, SpecError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.checks import check_spec
from vla_rl.runtime.driver import Driver
from vla_rl.runtime.roles.learner import LearnerRole
from vla_rl.runtime.start import run

APART = {"runtime": {"backend": "ray"}, "placement": {"type": "slots"}}
STREAM = {"asynchrony": {"stream": True}}
UNNORMALISED = {"normalize_advantages": False}
LENGTHS = {"length_sigma": 0.5, "length": 6, "max_steps": 24}
"""Trajectories of 1 to 12 chunk steps."""


@pytest.fixture
def piecemeal(monkeypatch):
    """Tickets come in one by one, about in the order of their numbers. -> samples of each part that learners trained
    on, filled by runs. AdamW gives gradients of 0 that rounding moves no size of their own."""
    finished, feed, random = Driver.finished, LearnerRole.feed, Random(0)
    held, parts = [], []

    def one(self, needed):
        if not held:
            held.extend(sorted(finished(self, needed), key=lambda number: -number - random.uniform(0, 6)))
        return [held.pop()]

    def counted(self, heavy, light, micro_batches, passes, first):
        parts.append(sum(map(len, micro_batches)))
        return feed(self, heavy, light, micro_batches, passes, first)

    monkeypatch.setattr(torch.optim, "AdamW", partial(torch.optim.AdamW, eps=1e-3))
    monkeypatch.setattr(Driver, "finished", one)
    monkeypatch.setattr(LearnerRole, "feed", counted)
    return parts


def weights_in(folder):
    return torch.load(folder / "checkpoints" / "last" / "trainer" / "learner.pt", weights_only=True)["weights"]


def changed(changes):
    """Of a spec whose optimiser steps have all samples."""
    given = {"env": LENGTHS, **changes}
    return {**given, "train": {"global_batch": None, "epochs": 1, "steps": 3, "max_grad_norm": 0.02, **given.get("train", {})}}


def same(folder, other, names=("whole", "streamed"), tolerance=2e-6):
    """Weights and metrics of two runs."""
    expected, got = (weights_in(folder / name) for name in names)
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    for line, wanted in zip(other, read_metrics(folder / names[0]), strict=True):
        repeats = line.pop("eval/repeats", None), wanted.pop("eval/repeats", None)
        assert repeats[0] == repeats[1] and line == pytest.approx(wanted, rel=1e-4, abs=2e-6)


CASES = {
    "grpo": {"algorithm": {"type": "grpo"}},
    "grpo, chunks": {"algorithm": {"type": "grpo", "log_prob": "chunk", "aggregation": "step-mean"}},
    "entropy": {"algorithm": {"type": "grpo", "entropy_coef": 0.01}},
    "epochs": {"algorithm": {"type": "grpo"}, "train": {"epochs": 2}},
    "resample": {"algorithm": {"type": "grpo"}, "rollout": {"resample": {"max_rounds": 2}}},
    "corrected": {"algorithm": {"type": "grpo", "correction": "decoupled"}, "rollout": {"lag": 1}},
    "ppo": {"algorithm": {"type": "ppo", **UNNORMALISED}},
    "ppo, actions": {"algorithm": {"type": "ppo", "advantage": "action", "log_prob": "action", **UNNORMALISED}},
    "ppo, trajectories": {"algorithm": {"type": "ppo", "aggregation": "trajectory-mean", **UNNORMALISED}},
    "ppo, epochs": {"algorithm": {"type": "ppo", **UNNORMALISED}, "train": {"epochs": 2, "value_lr": 1e-2}},
    "critic first": {"algorithm": {"type": "ppo", **UNNORMALISED}, "train": {"critic_warmup_steps": 2}},
    "segments": {
        "algorithm": {"type": "ppo", **UNNORMALISED},
        "rollout": {"auto_reset": "immediate", "steps": 8, "episodes": None, "group_size": 1},
    },
    "v-trace": {"algorithm": {"type": "ppo", "correction": "v-trace", **UNNORMALISED}, "rollout": {"lag": 2}},
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
