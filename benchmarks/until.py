"""What `vla-rl eval --until "better than RUN"` costs and how often it errs, on 100 pairs of policies.

    python benchmarks/until.py

Outcomes of pairs on 800 states: one policy succeeds in 60 %, and the same luck decides for the other in 60 % of the
states. Asked after every round of 50 states. The fixed test is McNemar's on as many states as it needs to find that
difference with 80 % power at 5 %.
"""

from __future__ import annotations

import numpy as np

from vla_rl.cli.benchmark.paired import Pair
from vla_rl.cli.until import bound_mean

STATES, ROUND, PAIRS = 800, 50, 100


def draw_outcomes(
    rng: np.random.Generator, states: int, rate: float, difference: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the outcomes of two policies on the same states; 60 % of the states decide for both."""
    luck = rng.random(states)
    other = np.where(rng.random(states) < 0.6, luck, rng.random(states))
    return luck < rate, other < rate + difference


def look_until(first: np.ndarray, second: np.ndarray) -> tuple[int, str]:
    values = (1.0 + second - first) / 2
    for count in range(ROUND, len(values) + 1, ROUND):
        low, high = bound_mean(values[:count])
        if low > 0.5 or high < 0.5:
            return count, "yes" if low > 0.5 else "no"
    return len(values), "open"


def find_power(rng: np.random.Generator, states: int, difference: float) -> float:
    rejected = 0
    for _ in range(200):
        first, second = draw_outcomes(rng, states, 0.6, difference)
        pair = Pair(
            n=states,
            first=int(first.sum()),
            second=int(second.sum()),
            first_only=int((first & ~second).sum()),
            second_only=int((second & ~first).sum()),
        )
        rejected += pair.p < 0.05
    return rejected / 200


def main() -> None:
    for difference in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3):
        rng = np.random.default_rng(int(1000 * difference))
        looks = [look_until(*draw_outcomes(rng, STATES, 0.6, difference)) for _ in range(PAIRS)]
        answers = [answer for _, answer in looks]
        sizes = [20, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1200, 1600, 2400, 4800, 9600]
        fixed = next((n for n in sizes if difference and find_power(rng, n, difference) >= 0.8), None)
        counts = [count for count, _ in looks]
        print(
            f"difference {difference:.2f}: " + ", ".join(f"{a} {answers.count(a)}" for a in ("yes", "no", "open")),
            end="",
        )
        print(f"; episodes median {np.median(counts):.0f}, mean {np.mean(counts):.0f}; fixed test {fixed}", flush=True)


if __name__ == "__main__":
    main()
