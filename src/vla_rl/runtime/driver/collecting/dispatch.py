"""Distribution of waiting tickets to the policy workers. A pure function."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.runtime.scheduling.admission import most_held

Batches = list[list[EpisodeRequest]]
"""Tickets in the batches in which they were issued."""


def distribute_tickets(
    queue: deque[deque[EpisodeRequest]],
    *,
    held: Mapping[int, int],
    envs: Mapping[int, int],
    policy_of_env: Mapping[int, int],
    runs_ahead: bool,
) -> dict[int, Batches]:
    """Remove tickets from the queue and give each to the worker that holds the fewest for each of its envs; tickets of
    a persistent stream go to the worker of their env. Return worker -> its new tickets.

    Args:
        queue: tickets that no worker holds, in the batches in which they were issued.
        held: worker -> number of tickets that it holds.
        envs: worker -> number of envs that it acts for.
        policy_of_env: env (index in the run) -> worker of its policy.
        runs_ahead: rollouts run ahead of training, so workers may hold any number of tickets.
    """
    counts = dict(held)
    limits = {worker: most_held(count, len(envs) > 1, runs_ahead) for worker, count in envs.items()}
    assigned: dict[int, Batches] = {worker: [] for worker in envs}

    def has_room() -> bool:
        return any(counts[worker] < limits[worker] for worker in envs)

    while queue and has_room():
        batch = queue[0]
        shares = {worker: list[EpisodeRequest]() for worker in envs}
        while batch and has_room():
            request = batch.popleft()
            if request.env_id is None:
                worker = min(envs, key=lambda worker: counts[worker] / envs[worker])
            else:
                worker = policy_of_env[request.env_id]
            shares[worker].append(request)
            counts[worker] += 1
        for worker, share in shares.items():
            if share:
                assigned[worker].append(share)
        if not batch:
            queue.popleft()
    return {worker: batches for worker, batches in assigned.items() if batches}
