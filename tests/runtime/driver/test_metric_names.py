"""Test the ownership of metrics: the runtime's names are refused from algorithms, and every name that it writes is
listed."""

from __future__ import annotations

import json
import math
import re

import attrs
import numpy as np
import pytest
import torch
from scripted_runs import scripted_spec

from vla_rl.core.declarations import AlgorithmPlugin, TrainerPlugin, TrainingData
from vla_rl.core.errors import PluginError
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import Advantages, Loss
from vla_rl.plugins.trainers.policy_gradient.impl import PolicyGradient
from vla_rl.runtime.start import clone, run
from vla_rl.toolkit.algorithms import result_checks


@attrs.frozen(kw_only=True)
class Config:
    named: str = "loss/policy"
    """Name of the metric that the loss reports."""
    part: str = "metrics"
    """Field of `Loss` or, for advantages, of `Advantages`."""


class Talkative(Algorithm):
    def __init__(self, config, context):
        self.named, self.part = config.named, config.part

    def advantages(self, rollout):
        valid = rollout.valid.float()
        said = {self.named: 1.0} if self.part == "advantages" else {}
        return Advantages(advantages=rollout.rewards.sum((0, 2))[None, :, None] * valid, weights=valid, metrics=said)

    def loss(self, scores, batch):
        total = -(scores.log_probs.sum(-1) * batch.advantages * batch.weights).sum()
        loss = Loss(total=total, metrics={"loss/policy": total.detach()})
        if self.part == "advantages":
            return loss
        return attrs.evolve(loss, **{self.part: {**getattr(loss, self.part), self.named: total.detach()}})


@attrs.frozen(kw_only=True)
class TrainerConfig:
    named: str | None = None
    """Name of a further metric, which is NaN."""
    array: bool = False
    """Whether the state holds an array of NumPy after the first update."""


class TalkativeTrainer(PolicyGradient):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.config = config
        self.mean = None

    def update(self, data):
        metrics = super().update(data)
        self.mean = np.zeros(2) if self.config.array else None
        return attrs.evolve(
            metrics, sums={**metrics.sums, **({self.config.named: math.nan} if self.config.named else {})}
        )

    def state(self):
        return {"mean": self.mean}


vla_rl_plugins = {
    "algorithm": {"talkative": AlgorithmPlugin(config=Config, build=Talkative, summary="names a metric")},
    "trainer": {
        "talkative": TrainerPlugin(
            config=TrainerConfig, build=TalkativeTrainer, summary="names a metric", trains_on=TrainingData.TRAJECTORIES
        )
    },
}


def spec(**algorithm):
    changes = scripted_spec(algorithm={"type": "talkative", **algorithm}, train={"steps": 1})
    return parse_spec({**changes, "plugins": [*changes["plugins"], __name__]})


@pytest.mark.parametrize(
    ("named", "part"),
    [
        ("loss/total", "metrics"),
        ("policy/grad_norm", "maxima"),
        ("update/samples", "metrics"),
        ("env/success_rate", "advantages"),
        ("step", "advantages"),
    ],
)
def test_a_name_of_the_runtime_is_refused_at_the_first_update(tmp_path, named, part):
    with pytest.raises(PluginError, match=rf"algorithm 'talkative' reports a metric {named!r}.*choose another name"):
        run(spec(named=named, part=part), tmp_path / "run", False)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def trained_by(folder, **trainer):
    changes = scripted_spec(train={"steps": 3, "checkpoint_every": 3}, trainer={"type": "talkative", **trainer})
    run(parse_spec({**changes, "plugins": [*changes["plugins"], __name__]}), folder, False)


@pytest.mark.parametrize("named", ["step", "eval/success_rate"])
def test_a_name_of_the_runtime_is_refused_from_a_trainer(tmp_path, named):
    with pytest.raises(PluginError, match=rf"trainer 'talkative' reports a metric {named!r}.*choose another name"):
        trained_by(tmp_path / "run", named=named)


def test_a_metric_of_a_trainer_that_is_not_a_number_is_warned_of_once(tmp_path, caplog):
    trained_by(tmp_path / "run", named="mine/q")
    assert caplog.text.count("step 1: trainer 'talkative' reports nan as the metric 'mine/q'") == 1
    assert caplog.text.count("mine/q") == 1


def test_a_state_that_no_checkpoint_can_hold_ends_the_run_after_its_first_update(tmp_path):
    """The state is looked at in step 1, and the first checkpoint is that of step 3."""
    with pytest.raises(PluginError, match=r"trainer 'talkative' returns a numpy.ndarray as state\(\)\['mean'\]"):
        trained_by(tmp_path / "run", array=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert not any("loss/total" in line for line in lines)


def test_every_name_that_the_runtime_writes_is_its_own(tmp_path):
    base = scripted_spec(
        algorithm={"type": "talkative"},
        train={"steps": 1},
        bc_warmup={"episodes": 8, "epochs": 1, "lr": 1e-3},
        imitation={"expert": {"episodes": 8}, "steps": 2, "lr": 1e-3},
        rollout={"task_sampling": {"type": "weighted"}},
        hooks=[{"type": "jsonl"}, {"type": "tensorboard"}],
    )
    made = parse_spec({**base, "plugins": [*base["plugins"], __name__]})
    run(made, tmp_path / "run", False)
    clone(made, tmp_path / "sft", False)
    lines = [json.loads(line) for path in tmp_path.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    names = {name for line in lines for name in line}
    assert len(names) > 30
    assert names - set(result_checks.find_reserved(names)) == {"loss/policy"}


def test_the_contract_says_which_names_are_whose():
    said = set(re.findall(r'"(\S+)"', Algorithm.loss.__doc__))
    groups = {f"{group}/" for group in result_checks.RESERVED_GROUPS}
    assert said == {result_checks.DEMANDED} | result_checks.RESERVED | groups


def test_names_of_algorithms_are_free():
    known = ["loss/policy", "loss/value", "policy/entropy", "policy/ratio_max", "srpo/reward", "advantage/std", "steps"]
    assert result_checks.find_reserved(known) == []
    assert result_checks.find_reserved(["loss/total", "loss/mine", "time/mine"]) == ["loss/total", "time/mine"]


def test_a_wrapper_that_reports_such_a_name_is_refused_too(tmp_path):
    (tmp_path / "adds.py").write_text(
        "import attrs\n"
        "from vla_rl import hookimpl\n"
        "@hookimpl(wraps='algorithm')\n"
        "def loss():\n"
        "    made = yield\n"
        "    return attrs.evolve(made, metrics={**made.metrics, 'loss/total': made.total.detach()})\n"
    )
    changes = scripted_spec(train={"steps": 1})
    made = parse_spec({**changes, "plugins": [*changes["plugins"], str(tmp_path / "adds.py")]})
    with pytest.raises(PluginError, match="algorithm 'grpo'.*'loss/total'"):
        run(made, tmp_path / "run", False)


def test_the_loss_of_a_step_counts_once(tmp_path):
    """The loss is the mean over the step's samples of -log p A, as the runtime sums it."""
    run(spec(), tmp_path / "run", False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if "loss/policy" in line]
    assert line["loss/total"] == pytest.approx(line["loss/policy"], rel=1e-5)
    assert torch.isfinite(torch.tensor(line["loss/total"]))
