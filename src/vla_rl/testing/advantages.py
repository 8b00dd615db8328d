"""Checks of advantages by `check_algorithm`, which changes a rollout: advantages must respond to rewards, in the right
direction and place, and to nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from vla_rl.core.fields import ROLLOUT, arrange_fields, list_arrays
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.run.selection import take_columns
from vla_rl.core.samples import by_action, has_steps
from vla_rl.core.types import Advantages, AdvantageScope, Array, Rollout, ValueGranularity
from vla_rl.testing import synthetic
from vla_rl.testing.common.findings import Findings
from vla_rl.toolkit.algorithms.functional import expand_to

STEPS, CHUNK, SIZE = 5, 2, 4
WON = (True, True, True, False, True, True, False, False, True, False, False, False)
"""Outcomes of three groups of four; each group keeps both successes and failures if one member's outcome flips."""
HUGE = 1000.0
"""A reward next to which the rest of the rollout is noise, even after normalisation."""
NOISE = 0.05
DISCOUNT = "discount by the steps between both"
MASK = "mask before sums, means and deviations"
TENSORS = ("advantages", "weights", "counts", "returns", "value_weights", "value_counts")


@frozen(eq=False)
class AdvantageCase:
    """An algorithm whose advantages are requested as the loop requests them."""

    algorithm: Algorithm
    f: Findings
    values: ValueGranularity
    features: int
    extras: Mapping[str, str]

    def make_rollout(self, won: tuple[bool, ...] = WON, ends: int | list[int] = STEPS * CHUNK) -> Rollout:
        """Episodes of these lengths; values are small, so that rewards tell."""
        result = synthetic.rollout(
            chunk_steps=STEPS,
            chunk=CHUNK,
            groups=len(won) // SIZE,
            group_size=SIZE,
            values=self.values,
            features=self.features,
            proximal=self.algorithm.needs.proximal_log_probs,
            ends=[ends] * len(won) if isinstance(ends, int) else ends,
            won=won,
            extras=self.extras,
        )
        if result.values is None or result.next_values is None:
            return result
        return result.evolve(values=0.01 * result.values, next_values=0.01 * result.next_values)

    def compute_advantages(self, rollout: Rollout) -> Advantages:
        return self.algorithm.advantages(self.algorithm.shape_rewards(rollout))

    def weighted_advantages(self, rollout: Rollout) -> Tensor:
        """[T * C, N]: advantage times share of the loss, of each action; where neither is by action, its chunk's."""
        result, like = self.compute_advantages(rollout), rollout.rewards
        counts = result.divisors[0].sum().clamp_min(1e-12)
        return by_action(expand_to(result.advantages, like) * expand_to(result.weights, like) / counts)

    def expect_same(
        self,
        one: Advantages,
        other: Advantages,
        expected: str,
        remedy: str,
        *,
        got: str = "others",
        names: Sequence[str] = TENSORS,
        tolerance: float = 0.0,
        pick: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """Expect that the named tensors of both are the same, of the first one what `pick` takes."""
        for name in names:
            tensor = getattr(one, name)
            same = same_tensor(None if tensor is None else pick(tensor), getattr(other, name), tolerance)
            self.f.expect(same, f"advantages: {name}", expected, got, remedy)

    def critic_targets(self, rollout: Rollout) -> Tensor:
        """[T * C, N]: the critic's targets."""
        returns = self.compute_advantages(rollout).returns
        assert returns is not None  # found before
        return by_action(expand_to(returns, rollout.rewards))


def check_advantages(case: AdvantageCase) -> None:
    """Findings on all of them."""
    checks: list[Callable[[AdvantageCase], None]] = [
        _same_results_twice,
        _keeps_the_rest,
        _outcomes_matter,
        _any_order,
        _credit_of_rewards,
        _use_of_groups,
        _invalid_actions,
        _longer_rollout,
    ]
    if case.values != "none":
        checks += [_critic_baseline, _unfinished_episodes]
    if case.algorithm.advantage_scope is AdvantageScope.GROUP:
        checks.append(_group_scope)
    case.f.run_checks(checks, case)


def same_tensor(one: Tensor | None, other: Tensor | None, tolerance: float = 0.0) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and bool(((one - other).abs() <= tolerance * (1 + other.abs())).all())


def _same_results_twice(case: AdvantageCase) -> None:
    rollout, remedy = case.make_rollout(), "no random numbers, and no state: a resumed run would not have it"
    algorithm, f = case.algorithm, case.f
    shaped = [algorithm.shape_rewards(rollout) for _ in range(2)]
    same = same_tensor(shaped[0].rewards, shaped[1].rewards)
    f.expect(same, "shape_rewards", "the same rewards for the same rollout", "others the second time", remedy)
    selections = [algorithm.select(part) for part in shaped]
    expected = "the same choice for the same rollout"
    f.expect(torch.equal(*selections), "select", expected, "another the second time", remedy)
    one, other = (algorithm.advantages(part) for part in shaped)
    case.expect_same(one, other, "the same for the same rollout", remedy, got="others the second time")


def _keeps_the_rest(case: AdvantageCase) -> None:
    rollout = case.make_rollout()
    shaped = case.algorithm.shape_rewards(rollout)
    for field in attrs.fields(Rollout):
        one, other = getattr(shaped, field.name), getattr(rollout, field.name)
        if isinstance(other, torch.Tensor) and field.name != "rewards":
            remedy = "rewrite rewards alone: rollout.evolve(rewards=...)"
            case.f.expect(torch.equal(one, other), "shape_rewards", f"`{field.name}` unchanged", "others", remedy)
    chosen = bool(case.algorithm.select(shaped).any())
    text = "trajectories of groups in which some succeed and some fail"
    remedy = "these are what can be learned from; mind the filter"
    case.f.expect(chosen, "select", text, "none of them", remedy)


def _outcomes_matter(case: AdvantageCase) -> None:
    for n in (1, 5, 10):
        pulls = []
        for outcome in (False, True):
            won = (*WON[:n], outcome, *WON[n + 1 :])
            pulls.append(float(case.weighted_advantages(case.make_rollout(won))[:, n].mean()))
        rises = pulls[1] > pulls[0] + 1e-6 * max(map(abs, pulls))
        expected = "more weight * advantage for a trajectory that succeeds than for the same one that fails"
        remedy = "let them rise with the rewards (advantages above 0 are made more likely)"
        case.f.expect(rises, "advantages", expected, f"{pulls[1]:.3g} and {pulls[0]:.3g}", remedy)


def _any_order(case: AdvantageCase) -> None:
    """Columns in another order, groups under other numbers."""
    rollout = case.make_rollout()
    columns = np.random.default_rng(0).permutation(len(WON))
    turned = take_columns(rollout, columns)
    turned = turned.evolve(groups=torch.tensor([31, 4, 17])[turned.groups])
    one, other, index = case.compute_advantages(rollout), case.compute_advantages(turned), torch.from_numpy(columns)
    expected = "the same for a trajectory wherever it stands, and whatever number its group has"
    remedy = "find members by `rollout.groups == number`"
    case.expect_same(one, other, expected, remedy, tolerance=1e-4, pick=lambda tensor: tensor[:, index])


def _credit_of_rewards(case: AdvantageCase) -> None:
    """A huge reward in the middle of a failure."""
    n, e = WON.index(False), STEPS // 2 * CHUNK + CHUNK - 1
    rollout = case.make_rollout()
    rewards = rollout.rewards.clone()
    rewards[STEPS // 2, n, -1] = HUGE
    changed_rollout = rollout.evolve(rewards=rewards)
    before, after = case.weighted_advantages(rollout), case.weighted_advantages(changed_rollout)
    peak = float(after[: e + 1, n].max() - after.median())
    holds = bool(after[e, n] >= before[e, n] - 1e-6)
    if case.values != "none":
        holds = float(after[e, n] - after.median()) > NOISE * peak > 0
    remedy = "let them rise with the rewards, at the step where these are paid"
    got = f"{float(before[e, n]):.3g}, then {float(after[e, n]):.3g}"
    case.f.expect(holds, "advantages", "a higher advantage of an action that is paid more", got, remedy)
    grown = float(after[0, n] - after[e, n])
    expected, remedy = "no more credit for an early action than for one that is paid", DISCOUNT
    got = f"{float(after[0, n]):.3g} for the first, {float(after[e, n]):.3g}"
    case.f.expect(grown <= NOISE * abs(peak) + 1e-6, "advantages", expected, got, remedy)
    leaks = float(after[e + 1 :, n].max() - after[: e + 1, n].min())
    remedy = "sum rewards from an action on, not up to it"
    expected = "as much credit for actions up to a reward as for those after it"
    case.f.expect(leaks <= NOISE * abs(peak) + 1e-6, "advantages", expected, "more for those after it", remedy)
    if case.values == "none":
        return
    rises = case.critic_targets(changed_rollout)[:, n] - case.critic_targets(rollout)[:, n]
    room = NOISE * float(rises[e].abs())
    holds = float(rises[e]) > 0 and bool((rises >= -room).all())
    got = f"a change of {float(rises[e]):.3g}"
    case.f.expect(holds, "advantages: returns", "a higher target where more is paid", got, "add the rewards")
    holds = bool((rises <= rises[e] + room).all())
    got = f"{float(rises.max()):.3g}, and {float(rises[e]):.3g}"
    case.f.expect(holds, "advantages: returns", "a target that rises most where more is paid", got, DISCOUNT)
    holds = bool((rises[e + 1 :].abs() <= room + 1e-6).all())
    remedy = "sum rewards from an action on, not up to it, and take advantages before they are normalised"
    case.f.expect(holds, "advantages: returns", "targets that know of later rewards only", "earlier ones too", remedy)
    if float(after[e + 1 :, n].max() - after.median()) <= NOISE * peak:  # each action has its own credit
        _episodes_apart(case)


def _use_of_groups(case: AdvantageCase) -> None:
    rollout, where, f = case.make_rollout(), "advantages", case.f
    if case.algorithm.needs.groups:
        equal_members = take_columns(rollout, np.array([0] * SIZE + [*range(SIZE, len(WON))]))
        largest = float(case.compute_advantages(equal_members).advantages[:, :SIZE].abs().max())
        expected = "0 in a group whose members are all alike, as `needs` has groups"
        f.expect(largest < 1e-4, where, expected, f"up to {largest:.3g}", "compare a score with its own group's")
        return
    without_groups = rollout.evolve(groups=torch.arange(len(WON)))
    same = same_tensor(
        case.compute_advantages(rollout).advantages, case.compute_advantages(without_groups).advantages, 1e-5
    )
    f.expect(same, where, "no use of groups, which `needs` lacks", "some", "add groups=True to its Requirements")


def _group_scope(case: AdvantageCase) -> None:
    """Each group by itself, as long as its longest trajectory."""
    ends = [(STEPS - n // SIZE) * CHUNK for n in range(len(WON))]
    rollout = case.make_rollout(ends=ends)
    remedy = "leave out advantage_scope, and let scope_reason name the setting that looks at others"
    expected = "the same for a group whatever others there are, as advantage_scope is GROUP"
    shaped = case.algorithm.shape_rewards(rollout)
    all_selected, all_advantages = case.algorithm.select(shaped), case.algorithm.advantages(shaped)
    for g in range(len(WON) // SIZE):
        columns = np.arange(g * SIZE, (g + 1) * SIZE)
        group_rollout = take_columns(rollout, columns)
        shorter = _change_steps(group_rollout, partial(_cut_tensor, steps=STEPS - g, columns=slice(None)))
        group_rollout = case.algorithm.shape_rewards(shorter)
        same = torch.equal(case.algorithm.select(group_rollout), all_selected[columns])
        case.f.expect(same, "select", expected, "another choice", remedy)
        part = case.algorithm.advantages(group_rollout)
        names = ("advantages", "weights", "returns", "value_weights")
        cut = partial(_cut_tensor, steps=STEPS - g, columns=columns)
        case.expect_same(all_advantages, part, expected, remedy, names=names, tolerance=1e-4, pick=cut)


def _cut_tensor(tensor: Tensor, steps: int, columns: Array | slice) -> Tensor:
    return tensor[:steps, columns]


def _change_steps(rollout: Rollout, change: Callable[[Tensor], Tensor]) -> Rollout:
    """Return the rollout with each field that has a time axis changed."""
    tensors = {
        name: change(tensor) if has_steps(name) else tensor for name, tensor in list_arrays(rollout, ROLLOUT).items()
    }
    return rollout.evolve(**arrange_fields(Rollout, tensors))


def _invalid_actions(case: AdvantageCase) -> None:
    """Check that numbers at invalid actions have no effect."""
    ragged = case.make_rollout(ends=CHUNK * 2 + 1)
    silent = ~ragged.valid
    log_probs = torch.where(silent[..., None], torch.tensor(-77.0), ragged.log_probs)
    changed = ragged.evolve(log_probs=log_probs)
    if ragged.values is not None:
        of_value = silent if ragged.values.dim() == 3 else ~ragged.samples
        changed = changed.evolve(values=torch.where(of_value, torch.tensor(77.0), ragged.values))
    one, other = case.compute_advantages(ragged), case.compute_advantages(changed)
    expected = "the same whatever stands where `valid` is False"
    case.expect_same(one, other, expected, MASK, tolerance=1e-5)


def _critic_baseline(case: AdvantageCase) -> None:
    n, t = WON.index(False), STEPS // 2
    rollout = case.make_rollout()
    assert rollout.values is not None
    values = rollout.values.clone()
    values[t, n] += HUGE
    one, other = case.weighted_advantages(rollout), case.weighted_advantages(rollout.evolve(values=values))
    e = t * CHUNK + CHUNK - 1
    got = f"{float(one[e, n]):.3g}, then {float(other[e, n]):.3g}"
    expected = "no higher advantage where the critic expected more"
    case.f.expect(bool(other[e, n] <= one[e, n]), "advantages", expected, got, "subtract the values")
    less = values.clone()
    less[t, n] -= 2 * HUGE
    lower = case.weighted_advantages(rollout.evolve(values=less))[e, n]  # advantages below 0 may be dropped
    expected = "a lower advantage where the critic expected more, as `needs` has values"
    used = not bool(other[e, n] == one[e, n] == lower)
    case.f.expect(used, "advantages", expected, "the same", "subtract the values")
    targets = case.critic_targets(rollout.evolve(values=values)) - case.critic_targets(rollout)
    holds = bool(targets[e, n] >= -NOISE * HUGE)
    expected = "no lower target where the critic expected more"
    remedy = "returns are advantages plus values, before any normalisation"
    case.f.expect(holds, "advantages: returns", expected, f"a change of {float(targets[e, n]):.3g}", remedy)


def _longer_rollout(case: AdvantageCase) -> None:
    """The same episodes in a rollout that is two chunk steps longer, for other episodes."""
    rollout = case.make_rollout(ends=[1 + n % (STEPS * CHUNK) for n in range(len(WON))])
    longer = _change_steps(rollout, lambda tensor: torch.cat([tensor, torch.zeros_like(tensor[:2])]))
    one, other = case.compute_advantages(rollout), case.compute_advantages(longer)
    expected, names = "the same however many steps follow in which nothing is valid", ("advantages", "returns")
    case.expect_same(other, one, expected, MASK, names=names, tolerance=1e-4, pick=lambda tensor: tensor[:STEPS])


def _unfinished_episodes(case: AdvantageCase) -> None:
    """Check that unfinished episodes bootstrap from the next value, if the algorithm uses values inside the rollout."""
    n, t = WON.index(False), STEPS // 2
    rollout: Any = case.make_rollout(ends=STEPS * CHUNK + 1)
    before = case.critic_targets(rollout)

    def target_change(name: str, at: int) -> Tensor:
        changed = getattr(rollout, name).clone()
        changed[at, n] += HUGE
        return case.critic_targets(rollout.evolve(**{name: changed}))[:, n] - before[:, n]

    if float(target_change("values", t)[t * CHUNK - 1].abs()) <= 1e-3 * HUGE:
        return  # targets of rewards alone
    got = float(target_change("next_values", -1)[-1])
    expected = "a higher target before the end of the rollout where what follows is worth more"
    remedy = "continue with rollout.next_values where an episode has not terminated"
    case.f.expect(got > NOISE * HUGE, "advantages: returns", expected, f"a change of {got:.3g}", remedy)


def _episodes_apart(case: AdvantageCase) -> None:
    """Check that a second episode in a column, as with `auto_reset`, does not affect the first."""
    rollout, n = case.make_rollout(), WON.index(False)
    assert rollout.values is not None and rollout.next_values is not None
    for how in ("terminated", "truncated"):
        ended = getattr(rollout, how).clone()
        ended[1, n, -1] = True
        once: Any = rollout.evolve(**{how: ended})
        rewards, values = once.rewards.clone(), once.values.clone()
        rewards[3, n, 0], values[2, n] = HUGE, -HUGE
        following = once.evolve(rewards=rewards, values=values)
        pull = case.weighted_advantages(following)
        gap = float((pull[: 2 * CHUNK, n] - pull.median()).abs().max() / (pull.max() - pull.min()).clamp_min(1e-12))
        expected, remedy = f"nothing of the next episode before the end of one ({how})", "cut sums at every end"
        case.f.expect(gap <= NOISE, "advantages", expected, f"{gap:.0%} of the largest advantage", remedy)
        gap = float((case.critic_targets(following) - case.critic_targets(once))[: 2 * CHUNK, n].abs().max())
        case.f.expect(gap <= NOISE * HUGE, "advantages: returns", expected, f"a change of {gap:.3g}", remedy)
    _after_termination(case, rollout)


def _after_termination(case: AdvantageCase, rollout: Rollout) -> None:
    """All episodes terminate at the last action; what follows has no value."""
    assert rollout.next_values is not None
    next_values = rollout.next_values.clone()
    next_values[-1] += HUGE
    valued = rollout.evolve(next_values=next_values)
    gap = float((case.critic_targets(valued) - case.critic_targets(rollout)).abs().max())
    expected = "no value of what follows a termination"
    case.f.expect(gap <= NOISE * HUGE, "advantages: returns", expected, f"{gap:.3g}", "multiply by ~terminated")
