"""Statistics that are added up and read once: right on known numbers, and the same for any split."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor as t

from vla_rl.toolkit.algorithms.statistics import EffectiveSize, Mean, RatioQuantiles, read_all

NAN = float("nan")


def test_mean_counts_what_is_in_the_mask():
    assert Mean.of(t([1.0, 5.0, NAN]), t([True, True, False])).read("m") == {"m": 3.0}
    assert Mean.of(t([NAN]), t([False])).read("m") == {}


def test_effective_size_is_a_share():
    everything = torch.ones(4, dtype=torch.bool)
    assert EffectiveSize.of(torch.full((4,), 3.0), everything).read("s") == {"s": 1.0}
    assert EffectiveSize.of(t([0.0, 0.0, 7.0, 0.0]), everything).read("s") == {"s": 0.25}
    assert EffectiveSize.of(t([1.0, 3.0, NAN, NAN]), t([True, True, False, False])).read("s") == {"s": 16 / 20}
    assert EffectiveSize.of(torch.zeros(4), everything).read("s") == {}


def test_quantiles_of_the_same_policy_are_exactly_one():
    found = RatioQuantiles.of(torch.zeros(5), torch.ones(5, dtype=torch.bool)).read("r")
    assert found == {"r_p50": 1.0, "r_p95": 1.0, "r_abs_log_p95": 0.0}


@pytest.mark.parametrize(
    ("ratio", "error"), [(1.001, 3e-5), (0.98, 3e-4), (1.28, 3e-3), (2.0, 8e-3), (math.exp(20), 0.3)]
)
def test_quantiles_are_within_half_a_bin(ratio, error):
    log_ratios = torch.full((3,), math.log(ratio))
    assert RatioQuantiles.of(log_ratios, torch.ones(3, dtype=torch.bool)).ratio_quantile(0.5) == pytest.approx(
        ratio, rel=error
    )


def test_quantiles_are_those_of_the_entries_in_the_mask():
    draws = torch.Generator().manual_seed(0)
    log_ratios = 0.1 * torch.randn(2000, generator=draws)
    mask = torch.rand(2000, generator=draws) < 0.5
    found = RatioQuantiles.of(torch.where(mask, log_ratios, t(NAN)), mask)
    inside = log_ratios[mask].exp().double()
    for share in (0.5, 0.95):
        assert found.ratio_quantile(share) == pytest.approx(float(inside.quantile(share)), rel=2e-3)
    assert RatioQuantiles.of(log_ratios, torch.zeros(2000, dtype=torch.bool)).read("r") == {}


def test_how_far_ratios_are_from_one_on_both_sides():
    """95 % of |log r|: of ratios that fell as of those that rose."""
    draws = torch.Generator().manual_seed(0)
    log_ratios = 0.1 * torch.randn(4000, generator=draws) - 0.05
    found = RatioQuantiles.of(log_ratios, torch.ones(4000, dtype=torch.bool)).read("r")
    wanted = float(log_ratios.abs().double().quantile(0.95))
    assert found["r_abs_log_p95"] == pytest.approx(wanted, rel=2e-2)
    assert found["r_abs_log_p95"] > 1.5 * math.log(found["r_p95"])
    fallen = RatioQuantiles.of(torch.full((3,), -2.0), torch.ones(3, dtype=torch.bool)).read("r")
    assert fallen["r_abs_log_p95"] == pytest.approx(2.0, rel=2e-2)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_any_split_reads_the_same(pieces, seed):
    draws = torch.Generator().manual_seed(seed)
    numbers, mask = torch.randn(40, generator=draws), torch.rand(40, generator=draws) < 0.7
    mask[0] = True
    for kind, entries in ((Mean, numbers), (EffectiveSize, numbers.exp()), (RatioQuantiles, numbers)):
        whole = kind.of(entries, mask).read("x")
        parts = [
            {"x": pickle.loads(pickle.dumps(kind.of(e, m).cpu()))}
            for e, m in zip(entries.tensor_split(pieces), mask.tensor_split(pieces), strict=True)
        ]
        assert read_all([*parts, {}]) == pytest.approx(whole, rel=1e-12)
