from __future__ import annotations

import attrs
import pytest
import torch

from vla_rl.core.errors import PluginError
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, Batch, Loss, Requirements, Rollout, Scores
from vla_rl.testing import CheckFailed, check_algorithm, synthetic
from vla_rl.toolkit.algorithms.declarations import check_declarations


class Reinforce(Algorithm):
    """The smallest algorithm that keeps to the contract."""

    def advantages(self, rollout: Rollout) -> Advantages:
        score = rollout.rewards.sum((0, 2))
        valid = rollout.valid.float()
        return Advantages(advantages=(score - 0.3)[None, :, None] * valid, weights=valid)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        total = -(scores.log_probs.sum(-1) * batch.advantages * batch.weights).sum()
        return Loss(total=total, metrics={"loss/policy": total.detach()})


class Critic(Reinforce):
    needs = Requirements(values=True)
    value_granularity = "action"

    def advantages(self, rollout):
        base = super().advantages(rollout)
        advantages = base.advantages - rollout.values * base.weights
        return attrs.evolve(base, advantages=advantages, returns=rollout.rewards, value_weights=base.weights)

    def loss(self, scores, batch):
        base = super().loss(scores, batch)
        return attrs.evolve(base, total=base.total + ((scores.values - batch.returns) ** 2 * batch.value_weights).sum())


def findings(algorithm: Algorithm) -> str:
    with pytest.raises(CheckFailed) as failed:
        check_algorithm(algorithm)
    return str(failed.value)


def test_algorithms_that_keep_to_the_contract_pass() -> None:
    check_algorithm(Reinforce())
    check_algorithm(Critic())


class PaysForTheDistance(Reinforce):
    """Pays for a number that the simulator declares."""

    def shape_rewards(self, rollout: Rollout) -> Rollout:
        return rollout.evolve(rewards=rollout.rewards - rollout.extras["distance"])

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        assert batch.extras["distance"].shape == batch.valid.shape
        return super().loss(scores, batch)


def test_an_algorithm_reads_numbers_of_a_simulator() -> None:
    check_algorithm(PaysForTheDistance(), extras={"distance": "C"})
    assert "samples have no number 'distance'; they have: none" in findings(PaysForTheDistance())


def test_an_algorithm_that_needs_groups_meets_no_single_trajectory() -> None:
    class LeaveOneOut(Reinforce):
        needs = Requirements(groups=True)

        def advantages(self, rollout):
            score = rollout.rewards.sum((0, 2))
            members = (rollout.groups[:, None] == rollout.groups).float()
            others = (members @ score - score) / (members.sum(1) - 1)
            valid = rollout.valid.float()
            return Advantages(advantages=(score - others)[None, :, None] * valid, weights=valid)

    check_algorithm(LeaveOneOut())


def test_a_loss_that_normalises_by_the_micro_batch_is_found() -> None:
    class Mean(Reinforce):
        def loss(self, scores, batch):
            total = -(scores.log_probs.sum(-1) * batch.advantages)[batch.valid].mean()
            return Loss(total=total, metrics={"loss/policy": total.detach()})

    text = findings(Mean())
    assert "expected the same gradient from micro-batches" in text
    assert "weights carry the normalisation" in text


def test_invalid_entries_that_count_are_found() -> None:
    class Unmasked(Reinforce):
        def advantages(self, rollout):
            base = super().advantages(rollout)
            return Advantages(advantages=base.advantages + 1, weights=torch.ones_like(base.weights))

    text = findings(Unmasked())
    assert "advantages: weights: expected 0 where not valid" in text
    assert "expected no gradient from actions that are not valid" in text


def test_nan_wrong_shapes_and_written_arguments_are_found() -> None:
    class Nan(Reinforce):
        def advantages(self, rollout):
            base = super().advantages(rollout)
            return attrs.evolve(base, advantages=base.advantages / base.weights)

    class Writes(Reinforce):
        def advantages(self, rollout):
            rollout.rewards.add_(1)
            return super().advantages(rollout)

    class Select(Reinforce):
        def select(self, rollout):
            return rollout.success.long()

    assert "advantages: advantages: expected finite numbers, got NaN or inf" in findings(Nan())
    assert "expected `rewards` of its argument unchanged" in findings(Writes())
    assert "select: expected bool [12], got int64 [12]" in findings(Select())


def test_a_critic_without_targets_is_found() -> None:
    class NoTarget(Critic):
        def advantages(self, rollout):
            return Reinforce.advantages(self, rollout)

    assert "advantages: returns: expected [4, 12, 3], as it needs values, got None" in findings(NoTarget())


WRONG_NEEDS = [
    (frozenset({"groups"}), "got frozenset of 'groups'; write `needs = Requirements(groups=True)` (from vla_rl import"),
    (["values", "groups"], "got list of 'groups', 'values'; write `needs = Requirements(values=True, groups=True)`"),
    ("frames", "got str of 'frames'; write `needs = Requirements(frames=True)`"),
    (set(), "got set of nothing; write `needs = Requirements()`"),
    ({"values", "recomputed-values"}, "write `needs = Requirements(values=True, recomputed_values=True)`"),
    (("group",), "no requirement 'group'; did you mean 'groups'?; there are: values, recomputed_values, proximal_"),
    (None, "got a NoneType; write `needs = Requirements(groups=True)` (from vla_rl import Requirements), for instance"),
    (Requirements, "got the class Requirements; write `needs = Requirements(groups=True)`"),
    (
        Requirements(recomputed_values=True, groups=True),
        "Requirements(values=True, recomputed_values=True, groups=True)`",
    ),
]


@pytest.mark.parametrize(("needs", "text"), WRONG_NEEDS)
def test_needs_that_are_not_requirements_are_found_with_the_line_to_write(needs: object, text: str) -> None:
    algorithm = Reinforce()
    algorithm.needs = needs  # type: ignore[assignment]
    assert text in findings(algorithm)
    with pytest.raises(PluginError) as refused:  # as the runtime refuses it
        check_declarations(algorithm, "mine")
    assert text in str(refused.value) and f"algorithm 'mine' ({__file__}:" in str(refused.value)


def test_a_scope_in_words_is_found() -> None:
    class Words(Reinforce):
        advantage_scope = "group"

    assert "got 'group'; write `advantage_scope = AdvantageScope.GROUP` (from vla_rl import" in findings(Words())


def test_requirements_unite() -> None:
    both = Requirements(values=True) | Requirements(values=True, reference=True)
    assert both == Requirements(values=True, reference=True)
    with pytest.raises(TypeError):
        Requirements(values=True) | {"reference"}  # type: ignore[operator]


def test_synthetic_rollouts_are_consistent() -> None:
    rolled = synthetic.rollout(values="chunk", features=5)
    ended = rolled.terminated | rolled.truncated
    assert not (ended & ~rolled.valid).any()
    assert (ended.sum((0, 2)) <= 1).all()
    assert ((rolled.rewards > 0).any(0).any(-1) == rolled.success).all()
    steps = rolled.valid.sum((0, 2))
    assert all(
        int(steps[e.number]) == e.steps and bool(rolled.success[e.number]) == e.success_once for e in rolled.episodes
    )
    flat = rolled.valid.permute(1, 0, 2).flatten(1)
    assert (flat[:, 1:] <= flat[:, :-1]).all()
    assert len({int(s) for s in steps}) > 4
    assert rolled.features.shape == (12, 5)
