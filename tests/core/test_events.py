"""Success rates and their intervals."""

from __future__ import annotations

import pytest

from vla_rl.core.events import wilson_interval


def test_wilson_interval_of_a_known_case():
    rate = wilson_interval(8, 10)
    assert (rate.rate, rate.n) == (0.8, 10)
    assert (rate.low, rate.high) == pytest.approx((0.4901, 0.9433), abs=1e-4)
    assert (wilson_interval(0, 5).low, wilson_interval(5, 5).high, wilson_interval(0, 0).high) == (0.0, 1.0, 1.0)
