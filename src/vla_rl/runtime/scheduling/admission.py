"""Admission: the number of tickets that a policy worker may hold."""

from __future__ import annotations

HELD = 2
"""Tickets that a worker holds for each of its envs if the run has several workers. Tickets that it does not hold can
go to another worker.
"""


def most_held(envs: int, several_workers: bool, runs_ahead: bool) -> float:
    """Return how many tickets a worker with this many envs may hold.

    With several workers the limit keeps tickets available for the others. There is no limit where rollouts run ahead of
    training: the driver may be waiting for learners when an env becomes free.
    """
    return HELD * envs if several_workers and not runs_ahead else float("inf")
