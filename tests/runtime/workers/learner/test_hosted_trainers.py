"""A learner hosts the trainer that a spec names."""

from __future__ import annotations

import pytest
from scripted_runs import read_metrics, scripted_spec

from vla_rl.core.errors import UserError
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.placement.components import build_algorithm
from vla_rl.runtime.start import run
from vla_rl.runtime.workers.learner.trainers import trainers_of
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.toolkit.trainers.trained_model import TrainedModel

MODULE = """
from attrs import frozen
from vla_rl.core.trainers import Trainer
from vla_rl.core.declarations import TrainerPlugin, TrainingData
from vla_rl.plugins.trainers.policy_gradient.impl import PolicyGradient

@frozen
class NoKeys:
    pass

class Counting(PolicyGradient):
    def update(self, data):
        metrics = super().update(data)
        return type(metrics)(**{**{k: getattr(metrics, k) for k in ("sums", "statistics", "seconds")},
                                "maxima": {**metrics.maxima, "policy/steps": float(len(data.steps))}})

class Whole(Trainer):
    __init__, restart = PolicyGradient.__init__, PolicyGradient.restart
    modules, optimizers, update = PolicyGradient.modules, PolicyGradient.optimizers, PolicyGradient.update

def plugin(cls, **declared):
    return TrainerPlugin(config=NoKeys, build=cls, summary="for tests", **declared)

vla_rl_plugins = {"trainer": {
    "counting": plugin(Counting, trains_on=TrainingData.TRAJECTORIES),
    "whole": plugin(Whole, trains_on=TrainingData.TRAJECTORIES),
}}
"""


def spec_with(folder, trainer, **changes):
    (folder / "own_trainers.py").write_text(MODULE)
    plugins = ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement", str(folder / "own_trainers.py")]
    return parse_spec(scripted_spec(trainer={"type": trainer}, plugins=plugins, **changes))


def test_a_trainer_of_a_module_trains(tmp_path):
    run(spec_with(tmp_path, "counting"), tmp_path / "run", False)
    lines = [line for line in read_metrics(tmp_path / "run") if "policy/grad_norm" in line]
    assert lines and all(line["policy/steps"] == line["update/optimizer_steps"] for line in lines)


def test_a_trainer_that_needs_the_whole_step_is_refused_with_streaming(tmp_path):
    spec = spec_with(tmp_path, "whole", asynchrony={"streaming_update": True})
    algorithm = build_algorithm(spec)
    make = trainers_of(spec, algorithm, (), lambda: None, compare_acting=False, imitation=False, folder=None)
    info = synthetic.env_info()
    trained = TrainedModel(LinearModel(info, 2), spec.train, name="linear", device="cpu", info=info, acting=False)
    with pytest.raises(UserError, match="'whole' cannot begin with a part of a training step; set asynchrony"):
        make(trained)


def test_a_plugin_that_does_not_say_what_it_learns_from_is_refused(tmp_path):
    (tmp_path / "own_trainers.py").write_text(MODULE.replace("trains_on=TrainingData.TRAJECTORIES", ""))
    plugins = ["vla_rl.testing.scripted", str(tmp_path / "own_trainers.py")]
    with pytest.raises(UserError, match="own_trainers.py.*missing 1 required keyword-only argument: 'trains_on'"):
        parse_spec(scripted_spec(trainer={"type": "counting"}, plugins=plugins))
