"""A learner that is away for a while: actors continue with their last weights, lose nothing, and the run catches up."""

from __future__ import annotations

import os
import signal
import time
from threading import Thread

import pytest
import torch
from scripted_runs import read_metrics, weights_in
from test_off_policy_runs import off_policy_spec

from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.driver.training.learners import RunLearners
from vla_rl.runtime.start import run

pytestmark = [pytest.mark.ray]
APART = {"runtime": {"backend": "ray"}, "placement": {"type": "disaggregated"}}
PATIENCE_S = 120.0


class Absence:
    """Stops the learner's process in the update of a step, until actors have collected what they may and `seconds` have
    passed."""

    def __init__(self, monkeypatch, at_step: int, expected: int, seconds: float) -> None:
        self.ahead = 0
        """Tickets of later steps that were collected when the learner came back."""
        self.seconds = 0.0
        self._expected = expected
        self._least = seconds
        self._thread: Thread | None = None
        train = RunLearners.train

        def stopping(learners, prepared, advantages):
            if learners.fleet.version + 1 == at_step and self._thread is None:
                self._thread = Thread(target=self._keep_away, args=(learners, self._stop(learners.fleet)))
                self._thread.start()
            return train(learners, prepared, advantages)

        monkeypatch.setattr(RunLearners, "train", stopping)

    def _stop(self, fleet) -> int:
        (learner,) = fleet.learners
        _, pid = fleet.backend.get(fleet.backend.processes[learner.worker_index])
        os.kill(pid, signal.SIGSTOP)
        return pid

    def _keep_away(self, learners, pid: int) -> None:
        begun = time.monotonic()
        try:
            while time.monotonic() < begun + PATIENCE_S:
                self.ahead = len(learners.collector.trajectories) - learners.shape.tickets_per_step
                self.seconds = time.monotonic() - begun
                if self.ahead >= self._expected and self.seconds >= self._least:
                    break
                time.sleep(0.01)
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("seconds", [0.0, pytest.param(60.0, id="a minute")])
def test_the_figures_are_those_of_a_learner_that_was_there(train, tmp_path, monkeypatch, seconds):
    steps = {"train": {"steps": 5}, "algorithm": {"type": "gipo"}}
    _, expected = train("simulated", rollout={"lag": 2}, **steps)
    absence = Absence(monkeypatch, at_step=2, expected=32, seconds=seconds)
    _, got = train("away", asynchrony={"max_lag": {"pinned": 2}}, **steps, **APART)
    assert absence.ahead == 32
    assert absence.seconds >= seconds
    learnt = [[line.get("loss/total") for line in lines] for lines in (expected, got)]
    assert learnt[0] == learnt[1]
    simulated, weights = weights_in(tmp_path / "simulated"), weights_in(tmp_path / "away")
    assert all(torch.equal(simulated[name], weights[name]) for name in simulated)


def test_actors_collect_up_to_max_lag_steps_and_the_replay_buffer_gets_all(tmp_path, monkeypatch):
    """SAC: the learner is away in the second of six steps of 4 episodes, and the other four steps may run ahead."""
    absence = Absence(monkeypatch, at_step=2, expected=16, seconds=0.0)
    spec = off_policy_spec(
        train={"steps": 6, "checkpoint_every": 6}, asynchrony={"max_lag": 10}, **APART, eval={"before": False}
    )
    results = run(parse_spec(spec), tmp_path / "run")
    assert absence.ahead == 16
    steps = [line for line in read_metrics(tmp_path / "run") if "off_policy/transitions" in line]
    assert len(steps) == 6
    assert results["tickets"]["trained"] == 24
    assert steps[-1]["off_policy/transitions"] == sum(line["update/samples"] for line in steps)
