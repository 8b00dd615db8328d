"""Results of trainer plugins: metrics that would be wrong in the table of a step, and states that no checkpoint holds."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from vla_rl.core.errors import PluginError
from vla_rl.core.manager import wrap
from vla_rl.core.trainers import Trainer, UpdateMetrics
from vla_rl.toolkit.trainers.result_checks import guard_trainer


class Talkative(Trainer):
    """A trainer that returns what it is given."""

    def __init__(self, result=None, state=None):
        self.result = result
        self.kept = state or {}

    def modules(self):
        return {}

    def optimizers(self):
        return {}

    def update(self, data):
        return self.result

    def state(self):
        return self.kept


def wrapped(**results):
    return wrap("trainer", Talkative(**results), "talkative", [guard_trainer("trainer 'talkative'")])


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"loss": 1.0}, "trainer 'talkative' returns a dict from `update`; return UpdateMetrics"),
        (UpdateMetrics(sums={"step": 1.0}), "reports a metric 'step'; the runtime writes .*choose another name"),
        (UpdateMetrics(maxima={"eval/success_rate": 1.0}), "reports a metric 'eval/success_rate'"),
        (UpdateMetrics(sums={"q": {"mean": 1.0}}), "reports a dict as the metric 'q' in UpdateMetrics.sums"),
        (UpdateMetrics(sums={"q": torch.ones(())}), "reports a Tensor as the metric 'q' .* is a number"),
        (UpdateMetrics(sums={3: 1.0}), "the metric 3 in UpdateMetrics.sums"),
        (UpdateMetrics(sums=[1.0]), "returns a list as UpdateMetrics.sums"),
        (UpdateMetrics(statistics={"q": 1.0}), "reports a float as the metric 'q' .* is a Statistic"),
    ],
)
def test_metrics_that_would_be_wrong_are_refused_in_one_line(result, text):
    with pytest.raises(PluginError, match=text) as caught:
        wrapped(result=result).update(None)
    assert "\n" not in str(caught.value)


def test_metrics_of_trainers_pass():
    metrics = UpdateMetrics(sums={"loss/total": 1.0, "off_policy/q": np.float32(2)}, maxima={"policy/grad_norm": 3})
    assert wrapped(result=metrics).update(None) is metrics


def test_a_metric_that_is_not_finite_is_warned_of_once():
    trainer = wrapped(result=UpdateMetrics(sums={"q": float("nan")}, warnings=("mine",)))
    assert trainer.update(None).warnings == ("mine", "trainer 'talkative' reports nan as the metric 'q'")
    assert trainer.update(None).warnings == ("mine",)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {"mean": np.zeros(3)},
            r"trainer 'talkative' returns a numpy.ndarray as state\(\)\['mean'\], and no checkpoint",
        ),
        ({"a": [1, {"b": Talkative()}]}, r"Talkative as state\(\)\['a'\]\[1\]\['b'\]"),
        ({"count": np.int64(3)}, r"numpy.int64 as state\(\)\['count'\]"),
        ({"draw": lambda: 0}, r"function as state\(\)\['draw'\]"),
        ({np.str_("a"): 1}, r"numpy.str_ as state\(\)"),
    ],
)
def test_a_state_that_no_checkpoint_holds_is_refused(state, text):
    with pytest.raises(PluginError, match=text):
        wrapped(state=state).state()


def test_a_state_that_a_checkpoint_holds_passes():
    plain = {"n": 1, 2: (True, None, 0.5, "text", [b"bytes"]), "t": torch.zeros(2, dtype=torch.bfloat16)}
    state = plain | {"ordered": collections.OrderedDict(a=torch.ones(1)), "set": {1, 2}}
    assert wrapped(state=state).state() is state
