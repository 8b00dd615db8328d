"""The metric `update/weights_changed`, in the type in which the policy acts."""

from __future__ import annotations

import pytest
import torch

from vla_rl.core.run.weight_changes import WEIGHTS_CHANGED
from vla_rl.core.types import Statistic
from vla_rl.toolkit.trainers import trained_model as changed_weights
from vla_rl.toolkit.trainers.parallel import SingleRank
from vla_rl.toolkit.trainers.trained_model import ChangedWeights

RANK = SingleRank()


def share(statistics: dict[str, Statistic]) -> float:
    return statistics[WEIGHTS_CHANGED].read(WEIGHTS_CHANGED)[WEIGHTS_CHANGED]


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 0.5), (torch.bfloat16, 0.125)])
def test_weights_are_compared_as_they_act(dtype: torch.dtype, expected: float) -> None:
    """Four of eight masters move, and one of them reaches another bfloat16 number."""
    master = torch.ones(8)
    changed = ChangedWeights({"a": dtype})
    changed.keep_weights({"a": master}, ["a"], RANK)
    master[:3] += 1e-3
    changed.keep_weights({"a": master}, ["a"], RANK)  # a second optimiser step of the same training step
    master[3] += 0.1
    assert share(changed.compare_weights({"a": master}, RANK)) == expected
    assert changed.compare_weights({"a": master}, RANK) == {}, "no optimiser stepped since"


def test_weights_that_a_step_leaves_out_do_not_count() -> None:
    weights = {"policy": torch.ones(6), "critic": torch.ones(2)}
    changed = ChangedWeights(dict.fromkeys(weights, torch.float32))
    changed.keep_weights(weights, ["critic"], RANK)
    weights["critic"] += 1
    assert share(changed.compare_weights(weights, RANK)) == 1.0


def test_many_weights_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every column of a matrix and every tensor has its share in the sample."""
    monkeypatch.setattr(changed_weights, "SAMPLED", 4096)
    weights = {f"layer{i}": torch.zeros(256, 96) for i in range(8)}
    changed = ChangedWeights(dict.fromkeys(weights, torch.float32))
    changed.keep_weights(weights, list(weights), RANK)
    for tensor in weights.values():
        tensor[:, :24] = 1
    statistic = changed.compare_weights(weights, RANK)[WEIGHTS_CHANGED]
    assert 3000 < float(statistic.sums[1]) <= 4096 + 8
    assert share({WEIGHTS_CHANGED: statistic}) == pytest.approx(0.25, abs=0.05)


def test_ranks_add_up() -> None:
    """Shards of different sizes weigh as many weights as they have."""
    results = []
    for size, moved in ((6, 3), (2, 2)):
        weight = torch.zeros(size)
        changed = ChangedWeights({"a": torch.float32})
        changed.keep_weights({"a": weight}, ["a"], RANK)
        weight[:moved] = 1
        results.append(changed.compare_weights({"a": weight}, RANK)[WEIGHTS_CHANGED])
    assert share({WEIGHTS_CHANGED: results[0] + results[1]}) == 5 / 8
