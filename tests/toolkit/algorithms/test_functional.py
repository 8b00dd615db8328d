"""Numbers worked by hand, then properties, then refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor as t

from vla_rl.core.errors import UserError
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.checks import MaskError, NotFiniteError, ShapeError
from vla_rl.toolkit.algorithms.statistics import EffectiveSize, Mean, RatioQuantiles


def test_valid_until_end_includes_the_ending_step():
    ended = t([[False, True], [True, False], [False, True]])
    assert F.valid_until_end(ended).tolist() == [[True, True], [True, False], [False, False]]


def test_reduce_tokens_leaves_out_invalid_actions():
    log_probs = t([[[1.0, 2.0], [4.0, 8.0]]])
    valid = t([[True, False]])
    assert F.reduce_tokens(log_probs, valid, "token").tolist() == [[[1.0, 2.0], [0.0, 0.0]]]
    assert F.reduce_tokens(log_probs, valid, "action").tolist() == [[3.0, 0.0]]
    assert F.reduce_tokens(log_probs, valid, "chunk").tolist() == [3.0]


def test_weighted_sum_ignores_nan_where_the_weight_is_zero():
    assert float(F.weighted_sum(t([1.0, float("nan")]), t([2.0, 0.0]))) == 2.0


def test_expand_to_keeps_the_sum_of_weights():
    expanded = F.expand_to(t([1.0, 3.0]), torch.zeros(2, 4, 5), mean=True)
    assert expanded.shape == (2, 4, 5) and float(expanded.sum()) == pytest.approx(4.0)


def test_gae_of_two_steps_by_hand():
    # delta_1 = 1 - 0.5 (terminated); delta_0 = 0 + 0.9 * 0.5 - 0.2 = 0.25; A_0 = 0.25 + 0.9 * 0.5 * 0.5
    advantages, returns = F.gae(
        t([[0.0], [1.0]]),
        t([[0.2], [0.5]]),
        torch.zeros(2, 1),
        t([[False], [True]]),
        torch.zeros(2, 1, dtype=torch.bool),
        gamma=0.9,
        lam=0.5,
    )
    assert advantages.flatten().tolist() == pytest.approx([0.475, 0.5])
    assert returns.flatten().tolist() == pytest.approx([0.675, 1.0])


def test_gae_bootstraps_a_truncation_with_its_final_observation():
    # row: truncated at t=0 with V(final) = 2; the next value 7 belongs to another episode
    advantages, _ = F.gae(
        t([[1.0], [0.0]]),
        t([[0.5], [7.0]]),
        t([[2.0], [3.0]]),
        torch.zeros(2, 1, dtype=torch.bool),
        t([[True], [False]]),
        gamma=0.5,
        lam=1.0,
    )
    assert advantages.flatten().tolist() == pytest.approx([1.0 + 0.5 * 2.0 - 0.5, 0.0 + 0.5 * 3.0 - 7.0])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 10**6))
def test_gae_with_lambda_one_and_zero_values_is_the_discounted_return(steps, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(steps, columns, generator=generator)
    terminated = torch.rand(steps, columns, generator=generator) < 0.3
    zeros = torch.zeros(steps, columns)
    advantages, _ = F.gae(rewards, zeros, zeros, terminated, torch.zeros_like(terminated), gamma=0.9, lam=1.0)
    for n in range(columns):
        for start in range(steps):
            total, factor = 0.0, 1.0
            for s in range(start, steps):
                total += factor * float(rewards[s, n])
                factor *= 0.9
                if terminated[s, n]:
                    break
            assert float(advantages[start, n]) == pytest.approx(total, abs=1e-5)


def test_group_advantages_by_hand():
    scores, groups = t([1.0, 0.0, 1.0, 1.0, 5.0]), t([0, 0, 1, 1, 2])
    out = F.group_advantages(scores, groups)
    root = math.sqrt(0.5)
    assert out.tolist() == pytest.approx([0.5 / (root + 1e-6), -0.5 / (root + 1e-6), 0.0, 0.0, 0.0])
    assert F.group_advantages(scores, groups, normalize_by_std=None).tolist() == [0.5, -0.5, 0.0, 0.0, 0.0]


def test_group_advantages_over_the_step():
    """REINFORCE++ with baseline: scores less their group's mean, normalised over all of them."""
    scores, groups = t([1.0, 0.0, 4.0, 0.0, 5.0]), t([0, 0, 1, 1, 2])
    centred = t([0.5, -0.5, 2.0, -2.0, 0.0])
    found = F.group_advantages(scores, groups, normalize_by_std="step")
    torch.testing.assert_close(found, centred / (centred.std() + 1e-6))
    assert not F.group_advantages(t([1.0, 1.0, 3.0]), t([0, 0, 1]), normalize_by_std="step").any()


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.5)])
def test_the_soft_gate(advantage, tau):
    """SAPO: the gradient, which is that of -A r at r = 1, is weighted by 4 p (1 - p), p = sigmoid(tau (r - 1))."""
    log_probs = torch.log(t([0.3, 1.0, 2.5, 4.0])).requires_grad_()
    old, gain = torch.zeros(4), torch.full((4,), advantage)
    loss = F.soft_surrogate(log_probs, old, gain, positive=1.0, negative=1.5)
    loss.sum().backward()
    for i, ratio in enumerate([0.3, 1.0, 2.5, 4.0]):
        p = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert float(loss[i].detach()) == pytest.approx(-advantage * 4 / tau * p, rel=1e-5)
        assert float(log_probs.grad[i]) == pytest.approx(-advantage * ratio * 4 * p * (1 - p), rel=1e-4)


def test_clip_stops_gain_above_the_upper_bound():
    loss = F.clipped_surrogate(t([[math.log(2.0)]]), torch.zeros(1, 1), torch.ones(1, 1), low=0.2, high=0.3)
    assert float(loss) == pytest.approx(-1.3)


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    new = t([math.log(10.0)])
    plain = F.clipped_surrogate(new, torch.zeros(1), -torch.ones(1), low=0.2, high=0.2)
    dual = F.clipped_surrogate(new, torch.zeros(1), -torch.ones(1), low=0.2, high=0.2, dual_clip=3.0)
    assert (float(plain), float(dual)) == pytest.approx((10.0, 3.0))


def test_clipped_entries_have_no_gradient_and_others_do():
    new = t([math.log(2.0), math.log(2.0), math.log(0.5), 0.0]).requires_grad_()
    advantages = t([1.0, -1.0, -1.0, 1.0])
    F.clipped_surrogate(new, torch.zeros(4), advantages, low=0.2, high=0.2).sum().backward()
    dead = F.find_clipped(new.detach(), torch.zeros(4), advantages, low=0.2, high=0.2)
    assert dead.tolist() == [True, False, True, False]
    assert (new.grad == 0).tolist() == dead.tolist()


def test_extreme_log_ratios_stay_finite():
    loss = F.clipped_surrogate(t([50.0, -50.0]), torch.zeros(2), t([-1.0, 1.0]), low=0.2, high=0.2)
    assert torch.isfinite(loss).all()


def test_trust_fades_with_the_log_ratio_and_has_no_gradient():
    # sigma 0.5: w(r = e^0.5) = exp(-1/2), w(1) = 1; the gradient of -w r A is -w r A
    new = t([0.5, 0.0, -0.5]).requires_grad_()
    loss = F.trust_surrogate(new, torch.zeros(3), t([1.0, 2.0, -1.0]), sigma=0.5)
    w = math.exp(-0.5)
    assert loss.tolist() == pytest.approx([-w * math.exp(0.5), -2.0, w * math.exp(-0.5)])
    loss.sum().backward()
    assert new.grad.tolist() == pytest.approx(loss.tolist())
    assert not F.trust_weights(new, torch.zeros(3), sigma=0.5).requires_grad


def test_a_dual_clip_takes_the_gradient_away_too():
    new = t([math.log(4.0)]).requires_grad_()
    F.clipped_surrogate(new, torch.zeros(1), -torch.ones(1), low=0.2, high=0.2, dual_clip=3.0).sum().backward()
    assert float(new.grad) == 0.0
    assert F.find_clipped(new.detach(), torch.zeros(1), -torch.ones(1), low=0.2, high=0.2, dual_clip=3.0).tolist() == [
        True
    ]
    assert F.find_clipped(new.detach(), torch.zeros(1), -torch.ones(1), low=0.2, high=0.2).tolist() == [False]


def test_leave_one_out_compares_with_the_others():
    scores, groups = t([1.0, 0.0, 0.5, 7.0]), t([0, 0, 0, 1])
    out = F.group_advantages(scores, groups, baseline="leave-one-out", normalize_by_std=None)
    assert out.tolist() == pytest.approx([1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5, 0.0])


def test_entries_that_are_not_valid_are_stepped_over():
    # the middle step of an ongoing episode is not valid: the first bootstraps from the last, whatever is in between
    keys = {"gamma": 0.5, "lam": 1.0}
    never = torch.zeros(3, 1, dtype=torch.bool)
    rewards, values = t([[1.0], [float("nan")], [2.0]]), t([[0.5], [float("inf")], [1.0]])
    valid = t([[True], [False], [True]])
    advantages, returns = F.gae(rewards, values, t([[0.0], [0.0], [4.0]]), never, never, valid=valid, **keys)
    short = F.gae(rewards[::2], values[::2], t([[0.0], [4.0]]), never[::2], never[::2], **keys)
    assert advantages.flatten().tolist() == [float(short[0][0]), 0.0, float(short[0][1])]
    assert returns.flatten().tolist() == [float(short[1][0]), 0.0, float(short[1][1])]


def test_discounted_returns_by_hand():
    # an end in the middle by time continues in its final observation (8), one by success does not
    rewards, none = t([[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]), torch.zeros(3, 2, dtype=torch.bool)
    terminated, truncated = none.clone(), none.clone()
    terminated[1, 0], truncated[1, 1] = True, True
    next_values = t([[0.0, 0.0], [0.0, 8.0], [4.0, 4.0]])
    found = F.discounted_returns(rewards, next_values, terminated, truncated, gamma=0.5)
    assert found.tolist() == [[1.0, 1.0 + 0.5 * 0.5 * 8.0], [0.0, 4.0], [4.0, 4.0]]


def test_value_clipped_is_where_the_clipped_branch_counts():
    triple = (t([2.0, 0.0, 0.5]), t([0.0, 2.0, 0.0]), t([0.5, 1.0, 0.5]))
    assert F.value_clipped(*triple, clip=0.2, huber_delta=None).tolist() == [False, False, False]
    # v = 0 and R = 2 from v_old = -1: clipped at -0.8, which is further away
    assert F.value_clipped(t([0.0]), t([2.0]), t([-1.0]), clip=0.2, huber_delta=10.0).tolist() == [True]
    assert F.value_clipped(t([0.0]), t([2.0]), t([-1.0]), clip=None, huber_delta=10.0).tolist() == [False]


def test_value_clipped_does_not_count_rounding():
    draws = torch.Generator().manual_seed(0)
    old, moves, returns = torch.randn(3, 10_000, generator=draws)
    values = old + 0.15 * moves
    inside = (values - old).abs() <= 0.2
    found = F.value_clipped(values, returns, old, clip=0.2, huber_delta=10.0)
    assert not found[inside].any() and found[~inside].any()


def test_kl_estimators_by_hand():
    d = math.log(0.5)
    assert float(F.kl_estimate(t([0.0]), t([d]), "k1")) == pytest.approx(-d)
    assert float(F.kl_estimate(t([0.0]), t([d]), "k2")) == pytest.approx(d * d / 2)
    assert float(F.kl_estimate(t([0.0]), t([d]), "k3")) == pytest.approx(0.5 - 1 - d)


def test_k3_has_no_bound_but_the_log_ratios():
    """RLinf and siiRL clamp it to +-10, from where on it has no gradient."""
    new = t([-3.0, -30.0]).requires_grad_()
    found = F.kl_estimate(new, torch.zeros(2), "k3")
    found.sum().backward()
    assert found.tolist() == pytest.approx([math.exp(3) - 4, math.exp(20) - 21], rel=1e-6)
    assert new.grad.tolist() == pytest.approx([1 - math.exp(3), 0.0], rel=1e-6)


def test_value_loss_takes_the_larger_of_both_branches():
    # v = 2, R = 0, v_old = 0.5, clip 0.2 -> v_clip = 0.7; h(2) = 2, h(0.7) = 0.245
    assert float(F.value_loss(t([2.0]), t([0.0]), t([0.5]), clip=0.2, huber_delta=None)) == pytest.approx(2.0)
    assert float(F.value_loss(t([2.0]), t([0.0]), t([0.5]), clip=0.2, huber_delta=1.0)) == pytest.approx(1.5)
    assert float(F.value_loss(t([0.0]), t([2.0]), t([1.0]), clip=0.2, huber_delta=None)) == pytest.approx(2.0)


def test_aggregations_by_hand():
    # column 0: 1 valid step, column 1: 3
    valid = t([[True, True], [False, True], [False, True]])
    ended = t([[True, False], [False, False], [False, True]])
    entries = t([[6.0, 1.0], [9.0, 2.0], [9.0, 3.0]])

    def reduce(name):
        weights, counts = F.loss_weights(valid, ended, name)
        return float((weights * entries).sum() / counts.sum())

    assert reduce("step-mean") == pytest.approx((6 + 1 + 2 + 3) / 4)
    assert reduce("trajectory-mean") == pytest.approx((6 + (1 + 2 + 3) / 3) / 2)
    assert reduce("rlinf") == pytest.approx((6 * 3 + 1 + 2 + 3) / 6)
    with pytest.raises(UserError, match="step-mean, trajectory-mean, rlinf"):
        reduce("mean")


def test_episode_lengths_count_each_episode_of_a_column():
    valid = t([[True], [True], [True], [True]])
    ended = t([[False], [True], [False], [False]])
    assert F.episode_lengths(valid, ended).flatten().tolist() == [2, 2, 2, 2]
    assert F.episode_lengths(valid, t([[True], [False], [False], [False]])).flatten().tolist() == [1, 3, 3, 3]


def test_rlinf_counts_lengths_in_actions_where_they_are_given():
    # one chunk of 4 actions of which 1 is valid, in a rollout of 2 chunks: T_max / T_i = 8 / 1, not 2 / 1
    valid, ended = t([[True], [False]]), t([[True], [False]])
    weights, counts = F.loss_weights(valid, ended, "rlinf", t([[1 / 8], [1 / 8]]))
    assert weights.tolist() == [[8.0], [0.0]] and counts.tolist() == [[2.0], [0.0]]


def test_normalize_uses_masked_entries_only():
    out = F.normalize_masked(t([1.0, 3.0, 100.0]), t([True, True, False]))
    assert out.tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2), 0.0])


def test_normalize_divides_by_n_less_one_or_by_n():
    """0, 2, 4 about 2: the sum of squares is 8, so the std is 2 (of n - 1) or sqrt(8 / 3) = 1.632993 (of n)."""
    values, everything = t([0.0, 2.0, 4.0]), t([True, True, True])
    assert F.normalize_masked(values, everything, std="unbiased").tolist() == pytest.approx([-1.0, 0.0, 1.0])
    assert F.normalize_masked(values, everything, std="population").tolist() == pytest.approx(
        [-1.2247449, 0.0, 1.2247449]
    )
    with pytest.raises(UserError, match="unknown std 'sample'; there are: unbiased, population"):
        F.normalize_masked(values, everything, std="sample")


# ------------------------------------------------------------------------------------------------------- hard numbers


@pytest.mark.parametrize("far", [50.0, -50.0, 1e4])
def test_far_ratios_stay_finite_in_loss_and_gradient(far):
    for loss in (
        lambda new, old, a: F.clipped_surrogate(new, old, a, low=0.2, high=0.2),
        lambda new, old, a: F.trust_surrogate(new, old, a, sigma=0.5),
        lambda new, old, a: F.kl_estimate(new, old, "k3"),
    ):
        new = torch.full((2,), far).requires_grad_()
        found = loss(new, torch.zeros(2), t([1.0, -1.0]))
        found.sum().backward()
        assert torch.isfinite(found).all() and torch.isfinite(new.grad).all()


def test_equal_scores_and_lone_members_give_exactly_nothing():
    third = torch.full((3,), 1 / 3)
    for baseline in ("mean", "leave-one-out"):
        assert not F.group_advantages(third, t([0, 0, 0]), baseline=baseline).any()
        assert not F.group_advantages(t([5.0, -2.0]), t([0, 1]), baseline=baseline).any()
    assert F.group_advantages(t([]), torch.zeros(0, dtype=torch.long)).shape == (0,)


@pytest.mark.parametrize("value", [0.1, 1.1, -0.3])
@pytest.mark.parametrize("count", [7, 999])
def test_equal_numbers_are_not_blown_up_by_a_std_of_rounding(value, count):
    equal = torch.full((count,), value)
    mask, noisy = torch.ones(count, dtype=torch.bool), torch.linspace(-1, 1, count)
    assert not F.normalize_masked(equal, mask).any()
    assert F.explained_variance(noisy, equal, mask) == 0.0
    sums = equal.clone()
    sums[0] += sums[0].abs() * 2e-7  # as sums of the same numbers in another order
    assert F.all_equal(sums) and not F.group_advantages(sums, torch.zeros(count, dtype=torch.long)).any()
    assert not F.all_equal(equal + 1e-5 * noisy)


def test_empty_masks_give_zeros_and_no_nan():
    nothing, entries = torch.zeros(3, 2, dtype=torch.bool), torch.full((3, 2), float("nan"))
    assert float(F.weighted_sum(entries, nothing.float())) == 0.0
    assert not F.normalize_masked(entries, nothing).any()
    assert F.explained_variance(entries, entries, nothing) == 0.0
    for name in ("step-mean", "trajectory-mean", "rlinf"):
        weights, counts = F.loss_weights(nothing, nothing, name)
        assert not weights.any() and not counts.any()
    assert not F.reduce_tokens(torch.full((2, 3, 4), float("nan")), torch.zeros(2, 3, dtype=torch.bool), "chunk").any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda bad: F.group_advantages(bad[:, 0], t([0, 0, 1])),
            r"scores \[3\]: 1 of 3 are not finite, the first at \[1\] \(nan\)",
        ),
        (
            lambda bad: F.normalize_masked(bad, torch.ones(3, 2, dtype=torch.bool)),
            r"values \[3, 2\]: 1 of 6 .* at \[1, 0\]",
        ),
        (lambda bad: F.gae(bad, zeros(), zeros(), never(), never(), gamma=1, lam=1), r"rewards \[3, 2\].* at \[1, 0\]"),
        (lambda bad: F.gae(zeros(), bad, zeros(), never(), never(), gamma=1, lam=1), r"values \[3, 2\]"),
        (lambda bad: F.gae(zeros(), zeros(), bad, never(), never(), gamma=1, lam=1), r"next_values \[3, 2\]"),
        (lambda bad: F.discounted_returns(bad, zeros(), never(), never(), gamma=1), r"rewards \[3, 2\]"),
    ],
)
def test_nan_is_named(call, message):
    bad = torch.zeros(3, 2)
    bad[1, 0] = float("nan")
    with pytest.raises(NotFiniteError, match=message):
        call(bad)


def zeros():
    return torch.zeros(3, 2)


def never():
    return torch.zeros(3, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: F.clipped_surrogate(a, a, b, low=0.2, high=0.2),
        lambda a, b: F.log_ratio(a, b),
        lambda a, b: F.value_loss(a, b, a, clip=None, huber_delta=None),
        lambda a, b: F.weighted_sum(a, b),
        lambda a, b: F.kl_estimate(a, b),
        lambda a, b: F.normalize_masked(a, b > 0),
        lambda a, b: F.group_advantages(a, b),
        lambda a, b: F.find_clipped(a, a, b, low=0.2, high=0.2),
        lambda a, b: F.trust_weights(a, b, sigma=1.0),
        lambda a, b: F.trust_surrogate(a, a, b, sigma=1.0),
        lambda a, b: F.value_loss(a, a, b, clip=None, huber_delta=None),
        lambda a, b: F.value_clipped(a, b, a, clip=None, huber_delta=None),
        lambda a, b: F.explained_variance(a, a, b > 0),
        lambda a, b: F.episode_lengths(a > 0, b > 0),
        lambda a, b: F.loss_weights(a > 0, b > 0, "step-mean"),
        lambda a, b: F.gae(a, b, a, a > 0, a > 0, gamma=1.0, lam=1.0),
        lambda a, b: F.gae(a, a, a, a > 0, a > 0, gamma=1.0, lam=1.0, valid=b > 0),
        lambda a, b: F.discounted_returns(a, a, a > 0, b > 0, gamma=1.0),
        lambda a, b: Mean.of(a, b > 0),
        lambda a, b: EffectiveSize.of(a, b > 0),
        lambda a, b: RatioQuantiles.of(a, b > 0),
    ],
)
def test_b_against_b1_is_refused_with_both_shapes(call):
    with pytest.raises(ShapeError, match=r"\[4\].*\[4, 1\]|\[4, 1\].*\[4\]"):
        call(torch.ones(4), torch.ones(4, 1))


def test_masks_of_another_granularity_are_refused():
    with pytest.raises(ShapeError, match=r"valid \[B, C\], got \[4, 3, 2\] and \[4\]"):
        F.reduce_tokens(torch.zeros(4, 3, 2), torch.ones(4, dtype=torch.bool), "action")
    with pytest.raises(ShapeError, match=r"\[4, 3\] cannot be expanded to \[4\]"):
        F.expand_to(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(ShapeError, match=r"\[4\] cannot be expanded to \[3, 4\]"):
        F.expand_to(torch.zeros(4), torch.zeros(3, 4))


CUBE = torch.zeros(2, 3, 4)
CUBE_MASK = CUBE > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.gae(CUBE, CUBE, CUBE, CUBE_MASK, CUBE_MASK, gamma=1.0, lam=1.0),
        lambda: F.discounted_returns(CUBE, CUBE, CUBE_MASK, CUBE_MASK, gamma=1.0),
        lambda: F.valid_until_end(CUBE_MASK),
        lambda: F.episode_lengths(CUBE_MASK, CUBE_MASK),
        lambda: F.loss_weights(CUBE_MASK, CUBE_MASK, "step-mean"),
    ],
)
def test_chunks_of_actions_are_not_a_time_axis(call):
    with pytest.raises(ShapeError, match=r"expected \[S, N\].*\[2, 3, 4\]; core.samples.by_action turns"):
        call()


def test_tokens_need_three_dimensions():
    with pytest.raises(ShapeError, match=r"\[B, C, M\] and valid \[B, C\], got \[2, 3\] and \[2\]"):
        F.reduce_tokens(torch.zeros(2, 3), torch.ones(2, dtype=torch.bool), "chunk")


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.float32])
def test_masks_are_bool(kind):
    numbers, mask = torch.zeros(3, 1), torch.zeros(3, 1, dtype=kind)
    for call in (
        lambda: F.gae(numbers, numbers, numbers, mask, mask, gamma=1.0, lam=1.0),
        lambda: F.normalize_masked(numbers, mask),
        lambda: F.explained_variance(numbers, numbers, mask),
        lambda: F.valid_until_end(mask),
        lambda: F.loss_weights(mask, mask, "step-mean"),
        lambda: F.reduce_tokens(numbers[..., None], mask, "token"),
    ):
        with pytest.raises(MaskError, match=f"masks are bool tensors, got .*{kind}; use mask > 0"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: F.reduce_tokens(torch.zeros(1, 1, 1), t([[True]]), "tokens"),
            "granularity 'tokens'; there are: token, action, chunk",
        ),
        (lambda: F.group_advantages(t([1.0, 2.0]), t([0, 0]), baseline="loo"), "baseline 'loo'; there are: mean, leav"),
        (lambda: F.kl_estimate(t([0.0]), t([0.0]), "k4"), "estimator 'k4'; there are: k1, k2, k3"),
    ],
)
def test_unknown_names_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_no_steps_have_no_advantages():
    nothing, never = torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)
    advantages, returns = F.gae(nothing, nothing, nothing, never, never, gamma=0.9, lam=0.9)
    assert advantages.shape == returns.shape == (0, 3)
