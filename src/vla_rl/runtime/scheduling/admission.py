"""How many tickets a policy worker holds."""

from __future__ import annotations

HELD = 2
"""Tickets that a worker holds for each of its rows, where there are several workers: what it does not hold, another
can play."""


def most_held(rows: int, several: bool, ahead: bool) -> float:
    """Tickets that a worker with so many rows holds at most. Where there are several workers, what one does not hold
    another can play; but where rollouts run ahead, the driver may wait for learners when a row becomes free."""
    return HELD * rows if several and not ahead else float("inf")
