"""From a rollout that the algorithm has judged to trained weights: which rank trains on which samples, how their heavy
parts get there, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, Rollout
from vla_rl.runtime.assignments import ranks_of
from vla_rl.runtime.backends.backend import Ref
from vla_rl.runtime.fleet import Fleet, Handle, by_reference
from vla_rl.runtime.learning.steps import Share, share_out
from vla_rl.runtime.roles.learner import LearnerRole
from vla_rl.runtime.roles.policy import PolicyRole
from vla_rl.runtime.rollouts.assemble import Gathered, Samples, find_samples, light_arrays
from vla_rl.runtime.rollouts.heavy import Heavy
from vla_rl.runtime.worker import Worker
from vla_rl.toolkit.algorithms.statistics import read_all

Array = np.ndarray[Any, Any]


def update(
    fleet: Fleet, spec: Spec, gathered: Gathered, kept: Rollout, keep: Array, advantages: Advantages
) -> dict[str, float]:
    """Train on the columns `keep` (indices) of a rollout, which `kept` is cut to. -> metrics."""
    samples = find_samples(kept, keep, gathered)
    light = light_arrays(kept, advantages, samples)
    shares = _shares(fleet, spec, kept.step, samples, light)
    # An update waits for those of all ranks: every take stands in front of every update.
    taken = [
        take(fleet, learner, samples.workers[share.samples], samples.places[share.samples])
        for learner, share in zip(fleet.learners, shares, strict=True)
    ]
    pending = []
    for learner, share, (mine, parts) in zip(fleet.learners, shares, taken, strict=True):
        of_rank = {name: None if array is None else array[share.samples] for name, array in light.items()}
        arrived = (by_reference(part) for part in parts)
        worker = fleet.worker_of(learner)
        pending.append(worker.call(Worker.update, kept.step, mine, of_rank, share.steps, *arrived))
    results = fleet.get_all(pending)
    return {
        "update/samples": float(len(samples.steps)),
        "update/optimizer_steps": float(len(shares[0].steps)),
        **joined(results),
        "time/learner": max(result["seconds"] for result in results),
    }


def take(
    fleet: Fleet, learner: Handle[LearnerRole], makers: Array, places: Array
) -> tuple[Array | None, list[Ref[Heavy | None]]]:
    """The heavy parts of samples, each worker's in ascending places. -> (places of those in the learner's own worker,
    the others on their way, by worker)."""
    policy_at = {policy.worker: policy for policy in fleet.policies}
    wanted = {int(worker): places[makers == worker] for worker in np.unique(makers)}
    own = wanted.pop(learner.worker, None)
    return own, [policy_at[w].call(PolicyRole.take_heavy, of_worker, True) for w, of_worker in wanted.items()]


def _shares(fleet: Fleet, spec: Spec, step: int, samples: Samples, light: dict[str, Array | None]) -> list[Share]:
    """What each rank trains on: what its own policy made first, then what others did, each in the order in which it
    lies there."""
    home = np.array([learner.worker for learner in fleet.learners])
    ranks = ranks_of(samples.workers, {learner.worker: rank for rank, learner in enumerate(fleet.learners)})
    source = np.where(samples.workers == home[ranks], 0, samples.workers + 1)
    order = np.empty(len(ranks), np.int64)
    order[np.lexsort((samples.places, source))] = np.arange(len(ranks))
    return share_out(
        ranks,
        order,
        light,
        world=len(fleet.learners),
        seed=spec.seed,
        step=step,
        epochs=spec.train.epochs,
        global_batch=spec.train.global_batch,
        micro_batch=spec.train.micro_batch,
    )


def joined(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of all ranks: sums added, maxima compared, statistics read."""
    metrics: dict[str, float] = {}
    for result in results:
        for name, value in result["sums"].items():
            metrics[name] = metrics.get(name, 0.0) + value
        for name, value in result["maxima"].items():
            metrics[name] = max(metrics.get(name, value), value)
    return metrics | read_all([result["statistics"] for result in results])
