"""Numbers of samples: a new one is one line in `core/fields.py`, and an algorithm declares its own."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest
import torch
from scripted_runs import scripted_spec

from vla_rl.core import fields
from vla_rl.core.declarations import AlgorithmPlugin
from vla_rl.core.errors import PluginError
from vla_rl.core.fields import Field, shape_matches
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.run import selection
from vla_rl.core.spec.spec import parse_spec
from vla_rl.core.types import Advantages, Loss
from vla_rl.runtime.driver.collecting import assembler
from vla_rl.runtime.start import run
from vla_rl.runtime.workers.policy.policy_worker import PolicyWorker


@attrs.frozen(kw_only=True)
class Config:
    dims: str = "T N C"
    returned: str = "target"


class WithTarget(Algorithm):
    """REINFORCE whose loss gets back twice the reward of each action, as its own number."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, config, context):
        self.extras = {"target": config.dims}
        self.returned = config.returned

    def advantages(self, rollout):
        valid = rollout.valid.float()
        advantages = rollout.rewards.sum((0, 2))[None, :, None] * valid
        return Advantages(advantages=advantages, weights=valid, extras={self.returned: 2 * advantages})

    def loss(self, scores, batch):
        self.seen.append(batch)
        total = -(scores.log_probs.sum(-1) * batch.advantages * batch.weights).sum()
        return Loss(total=total, metrics={"loss/policy": total.detach()})


vla_rl_plugins = {
    "algorithm": {"with_target": AlgorithmPlugin(config=Config, build=WithTarget, summary="keeps a target")}
}


def spec(**algorithm):
    changes = scripted_spec(algorithm={"type": "with_target", **algorithm}, train={"steps": 1, "epochs": 1})
    return parse_spec({**changes, "plugins": [*changes["plugins"], __name__]})


def test_an_algorithm_gets_its_own_numbers_back(tmp_path):
    WithTarget.seen.clear()
    run(spec(), tmp_path / "run", False)
    assert WithTarget.seen
    for batch in WithTarget.seen:
        assert torch.equal(batch.extras["target"], 2 * batch.advantages)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"returned": "other"}, r"declares extras \['target'\] and its `advantages` returned \['other'\]"),
        ({"dims": "T N"}, r"declares the extra 'target' as \[T, N\] and returned \[\d+, \d+, \d+\]; the rollout has T"),
    ],
)
def test_numbers_that_are_not_as_declared_are_refused(tmp_path, changes, said):
    with pytest.raises(PluginError, match=said):
        run(spec(**changes), tmp_path / "run", False)


def test_a_name_that_samples_have_already_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(WithTarget, "__init__", lambda self, config, context: None)
    monkeypatch.setattr(WithTarget, "extras", {"rewards": "T N C"}, raising=False)
    monkeypatch.setattr(WithTarget, "returned", "rewards", raising=False)
    with pytest.raises(PluginError, match="declares an extra 'rewards', and samples have a field of that name"):
        run(spec(), tmp_path / "run", False)


def test_a_new_number_of_every_sample_is_one_line(tmp_path, monkeypatch):
    """A policy that reports it, and a line in the table: the algorithm finds it in its rollout and its batches."""
    table = (*fields.ROLLOUT, Field(name="inference", dims="T N", source="policy", in_batch=True, fill=-1))
    for module in (fields, selection, assembler):
        monkeypatch.setattr(module, "ROLLOUT", table)
    results = PolicyWorker.ticket_results

    def with_inference(self, finished, framed):
        reported = results(self, finished, framed)
        return [light | {"inference": light["sample_ids"] // 1000} for light in reported]

    monkeypatch.setattr(PolicyWorker, "ticket_results", with_inference)
    rollouts = []
    advantages = WithTarget.advantages
    monkeypatch.setattr(
        WithTarget, "advantages", lambda self, rollout: rollouts.append(rollout) or advantages(self, rollout)
    )
    WithTarget.seen.clear()
    run(spec(), tmp_path / "run", False)
    (rollout,) = rollouts
    numbers = rollout.extras["inference"]
    assert numbers.shape == rollout.versions.shape
    assert (numbers[rollout.samples] >= 0).all()
    trained = torch.cat([batch.extras["inference"] for batch in WithTarget.seen])
    assert sorted(trained.tolist()) == sorted(numbers[rollout.samples].tolist())


def test_dimensions_in_brackets_may_be_missing():
    sizes = {"T": 3, "N": 2, "C": 4}
    assert shape_matches((3, 2), "T N [C]", sizes)
    assert shape_matches((3, 2, 4), "T N [C]", sizes)
    assert not shape_matches((3, 2, 5), "T N [C]", sizes)
    assert not shape_matches((2, 3), "T N", sizes)
    assert shape_matches((3, 2, 7), "T N D", sizes)
