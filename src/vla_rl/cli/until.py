"""`vla-rl eval --until`: an evaluation that ends when its question is answered, however often that is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field

from vla_rl.cli.benchmark.paired import Episodes, check_evaluations, read_episodes
from vla_rl.core.errors import UserError
from vla_rl.core.types import Episode
from vla_rl.toolkit.json_files import read_record

ERROR = 0.05
"""Probability that the interval ever leaves out the true mean."""
GRID = np.linspace(0.0, 1.0, 2001)
"""Means that are tried."""
MOST_BET = 0.5
"""Largest share of the capital that a bet can lose."""


def bound_mean(values: Iterable[float]) -> tuple[float, float]:
    """Return a confidence interval for the mean of values in 0 ... 1, taken in order, that holds at every number of
    values at once: the hedged capital process with predictable plug-in bets (Waudby-Smith and Ramdas,
    "Estimating means of bounded random variables by betting", JRSS B 86(1), 2024, arXiv:2010.09686, theorem 3)."""
    up, down = np.zeros_like(GRID), np.zeros_like(GRID)
    total, squares = 0.5, 0.25
    with np.errstate(divide="ignore"):
        for count, value in enumerate(values, 1):
            bet = np.sqrt(2 * np.log(2 / ERROR) / (squares * np.log(1 + count)))
            up += np.log1p(np.minimum(bet, MOST_BET / GRID) * (value - GRID))
            down += np.log1p(-np.minimum(bet, MOST_BET / (1 - GRID)) * (value - GRID))
            total += value
            squares += (value - total / (count + 1)) ** 2
    kept = GRID[np.maximum(up, down) < np.log(2 / ERROR)]
    return (float(kept.min()), float(kept.max())) if len(kept) else (0.0, 1.0)


@define(kw_only=True)
class StoppingRule:
    """The question of an evaluation, and its answer."""

    rule: str
    threshold: float
    """Success rate that is compared with, or 0.5 for half of one plus the difference of two policies."""
    other: Episodes | None = field(default=None, repr=False)
    """Outcomes of the other policy; None: the question is about one policy."""

    answer: dict[str, Any] = field(factory=dict, init=False)
    """For results.json: the interval of the rate, or of the difference, after n of all states."""

    def is_answered(self, episodes: Sequence[Episode], states: int) -> bool:
        """Return whether the episodes so far, in order, are enough. With another policy a state that both ran counts
        (1 + difference) / 2."""
        outcomes = [(("", one.task, one.state, one.episode), float(one.success_once)) for one in episodes]
        other = self.other
        values = (
            [success for _, success in outcomes]
            if other is None
            else [(1 + success - other[key]) / 2 for key, success in outcomes if key in other]
        )
        low, high = bound_mean(values)
        answer = "yes" if low > self.threshold else "no" if high < self.threshold else "open"
        if other is not None:
            low, high = 2 * low - 1, 2 * high - 1
        counts = {"n": len(values), "states": states}
        self.answer = {"rule": self.rule, "answer": answer, **counts, "low": low, "high": high}
        return answer != "open"


def read_rule(text: str) -> StoppingRule:
    """Read `above 0.9` or `better than RUN`, of which an evaluation was written. Raise UserError."""
    if match := re.fullmatch(r"\s*above\s+(0?\.\d+|0|1(?:\.0*)?)\s*", text):
        return StoppingRule(rule=text, threshold=float(match[1]))
    if match := re.fullmatch(r"\s*better than\s+(\S.*?)\s*", text):
        path = Path(match[1])
        results = path / "results.json"
        path = results if results.is_file() and "episodes" in read_record(results).data else path
        check_evaluations(path)
        return StoppingRule(rule=text, threshold=0.5, other=read_episodes(path))
    raise UserError(f"--until {text!r} is neither 'above RATE', such as 'above 0.9', nor 'better than RUN'")


def describe_answer(until: dict[str, Any]) -> str:
    """Return the answer in one line."""
    if not until["n"]:
        return f"{until['rule']}: open, as the two have no evaluation state in common"
    what = "difference" if until["rule"].split()[0] == "better" else "rate"
    return (
        f"{until['rule']}: {until['answer']}, after {until['n']} of {until['states']} episodes; {what} within "
        f"[{until['low']:.3f}, {until['high']:.3f}], which holds with 95 % however often one looks"
    )
