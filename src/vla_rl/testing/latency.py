"""Latencies of the test doubles of simulator and model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from random import Random


class Latency:
    """Sleeps of a given mean, lognormal around it."""

    def __init__(self, seconds: float, sigma: float = 0.0, seed: int = 0, row_seconds: float = 0.0) -> None:
        """sigma: standard deviation of the logarithm; with 0.7 one sleep in a hundred takes 5 times the median.
        row_seconds: besides, for each row of a call."""
        self.seconds = seconds
        self.sigma = sigma
        self.row_seconds = row_seconds
        self._random = Random(seed)

    def draw_seconds(self) -> float:
        """Seconds of the next one."""
        return self.seconds * math.exp(self.sigma * self._random.gauss(0.0, 1.0) - self.sigma**2 / 2)

    def simulate_latency(self, times: int = 1, rows: int = 0) -> None:
        """Sleep for `times` draws of the latency, plus the time of `rows` rows."""
        seconds = times * self.draw_seconds() + self.row_seconds * rows
        if seconds:
            time.sleep(seconds)


def wait_for_slowest(latencies: Iterable[Latency]) -> None:
    """Side by side."""
    seconds = max((latency.draw_seconds() for latency in latencies), default=0.0)
    if seconds:
        time.sleep(seconds)
