"""The clock of an env, with a clock of the test's own."""

from __future__ import annotations

import pytest

from vla_rl.toolkit.envs.real_time import RealTime


class Clock:
    """Time that passes only when it is advanced, or slept."""

    def __init__(self):
        self.time = 100.0
        self.slept = []

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds


def test_actions_begin_a_period_apart_and_late_ones_are_told():
    """At 10 Hz: in time, in time, 5 ms late (tolerated), 50 ms late, and then a whole period later again."""
    clock = Clock()
    real_time = RealTime(10, clock.now, clock.sleep)
    begins, late = [], []
    for thinking in (0.0, 0.02, 0.1, 0.105, 0.145, 0.0):
        clock.time += thinking
        late.append(real_time.wait())
        begins.append(clock.time - 100)
    assert late == [False, False, False, False, True, False]
    assert begins == pytest.approx([0.0, 0.1, 0.2, 0.305, 0.45, 0.55])
    assert clock.slept == pytest.approx([0.08, 0.1])


def test_an_episode_begins_with_an_action_that_is_in_time():
    clock = Clock()
    real_time = RealTime(10, clock.now, clock.sleep)
    real_time.wait()
    clock.time += 5.0
    real_time.restart()
    assert not real_time.wait() and not clock.slept


def test_without_a_rate_nothing_waits():
    clock = Clock()
    real_time = RealTime(None, clock.now, clock.sleep)
    assert [real_time.wait() for _ in range(3)] == [False] * 3 and not clock.slept
