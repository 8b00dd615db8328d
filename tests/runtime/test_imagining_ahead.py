"""Practice in a world model while rollouts run ahead of training, and with simulators in several workers."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from practising import EDM, ORACLE, practise, small
from scripted_runs import read_metrics, weights_in

from vla_rl.core.spec.spec import parse_spec

pytestmark = [pytest.mark.ray, pytest.mark.slow]
WORLDS = pytest.mark.parametrize("world", [ORACLE, EDM], ids=["oracle", "edm"])
APART = {"runtime": {"backend": "ray"}, "placement": {"type": "disaggregated"}}


def steps_of(metrics) -> dict[int, dict]:
    return {line["step"]: line for line in metrics if "world_model/updates" in line}


def learnt(metrics) -> dict[int, dict]:
    """What comes of the numbers of a run, whatever was played meanwhile."""
    shown = ("loss/", "policy/", "world_model/", "imagination/", "env/", "advantages/")
    return {n: {k: v for k, v in line.items() if k.startswith(shown)} for n, line in steps_of(metrics).items()}


@WORLDS
@pytest.mark.parametrize("lag", [1, 2])
def test_pinned_it_is_the_run_that_is_simulated(tmp_path, world, lag) -> None:
    """Bit for bit the synchronous run with old weights: fits see the episodes of their step and no later ones, and the
    newest weights practise."""
    _, expected = practise(tmp_path / "simulated", world_model=world, rollout={"lag": lag})
    asynchrony = {"max_lag": lag, "swap": "pinned"}
    _, found = practise(tmp_path / "asynchronous", world_model=world, asynchrony=asynchrony, **APART)
    assert learnt(found) == learnt(expected)
    one, other = (weights_in(tmp_path / name) for name in ("simulated", "asynchronous"))
    assert all(torch.equal(one[name], other[name]) for name in one)
