"""How long the test doubles of simulator and model take."""

from __future__ import annotations

import math
import time
from random import Random


class Latency:
    """Sleeps of a given mean, lognormal around it."""

    def __init__(self, seconds: float, sigma: float = 0.0, seed: int = 0) -> None:
        """sigma: standard deviation of the logarithm; with 0.7 one sleep in a hundred takes 5 times the median."""
        self.seconds, self.sigma, self._random = seconds, sigma, Random(seed)

    def draw(self) -> float:
        """Seconds of the next one."""
        return self.seconds * math.exp(self.sigma * self._random.gauss(0.0, 1.0) - self.sigma**2 / 2)

    def wait(self, times: int = 1) -> None:
        if self.seconds:
            time.sleep(times * self.draw())
