"""From a rollout that the algorithm has judged to trained weights: which rank trains on which samples, how their heavy
parts get there, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, Rollout
from vla_rl.runtime.assignments import ranks_of
from vla_rl.runtime.fleet import Fleet, by_reference
from vla_rl.runtime.learning.steps import Share, share_out
from vla_rl.runtime.roles.policy import PolicyRole
from vla_rl.runtime.rollouts.assemble import Played, Samples, find_samples, light_arrays
from vla_rl.runtime.worker import Worker
from vla_rl.toolkit.algorithms.statistics import read_all

Array = np.ndarray[Any, Any]


def update(
    fleet: Fleet, spec: Spec, played: Played, kept: Rollout, keep: Array, advantages: Advantages
) -> dict[str, float]:
    """Train on the columns `keep` (indices) of a rollout, which `kept` is cut to; all stores are empty then.
    -> metrics."""
    samples = find_samples(kept, keep, played.positions, played.owner)
    light = light_arrays(kept, advantages, samples)
    shares = _shares(fleet, spec, kept.step, played, samples, light)
    wanted = [_wanted(fleet, played, samples, share) for share in shares]
    own = [of_workers.pop(learner.worker, []) for learner, of_workers in zip(fleet.learners, wanted, strict=True)]
    policy_at = {policy.worker: policy for policy in fleet.policies}
    # Workers answer in order, and an update waits for all ranks: every take stands in front of every update.
    taken = [
        [policy_at[worker].call(PolicyRole.take_heavy, keys, True) for worker, keys in sorted(of_workers.items())]
        for of_workers in wanted
    ]
    pending = []
    for learner, share, mine, parts in zip(fleet.learners, shares, own, taken, strict=True):
        of_rank = {name: None if array is None else array[share.samples] for name, array in light.items()}
        arrived = (by_reference(part) for part in parts)
        worker = fleet.worker_of(learner)
        pending.append(worker.call(Worker.update, kept.step, mine, of_rank, share.steps, *arrived))
    at_learners = {learner.worker for learner in fleet.learners}
    clearing = [p.call(PolicyRole.clear_store) for p in fleet.policies if p.worker not in at_learners]
    results = fleet.get_all(pending)
    fleet.get_all(clearing)
    return {
        "update/samples": float(len(samples.steps)),
        "update/optimizer_steps": float(len(shares[0].steps)),
        **_joined(results),
        "time/learner": max(result["seconds"] for result in results),
    }


def _shares(
    fleet: Fleet, spec: Spec, step: int, played: Played, samples: Samples, light: dict[str, Array | None]
) -> list[Share]:
    """What each rank trains on: what its own policy made first, then what others did, each in the order in which it
    lies there."""
    maker = np.array([fleet.policy_of[block.lane.index].worker for block in played.blocks])[samples.blocks]
    home = np.array([learner.worker for learner in fleet.learners])
    ranks = ranks_of(maker, {learner.worker: rank for rank, learner in enumerate(fleet.learners)})
    source = np.where(maker == home[ranks], 0, maker + 1)
    blocks, positions = len(played.blocks), int(samples.positions.max()) + 1
    return share_out(
        ranks,
        (source * blocks + samples.blocks) * positions + samples.positions,
        light,
        world=len(fleet.learners),
        seed=spec.seed,
        step=step,
        epochs=spec.train.epochs,
        global_batch=spec.train.global_batch,
        micro_batch=spec.train.micro_batch,
    )


def _wanted(fleet: Fleet, played: Played, samples: Samples, share: Share) -> dict[int, list[Any]]:
    """Worker -> what its `PolicyRole.take_heavy` is asked for, for the samples of one rank."""
    wanted: dict[int, list[Any]] = {}
    of_block = samples.blocks[share.samples]
    for b in dict.fromkeys(of_block.tolist()):
        lane = played.blocks[b].lane.index
        inside = samples.positions[share.samples[of_block == b]]
        wanted.setdefault(fleet.policy_of[lane].worker, []).append(((lane, played.blocks[b].round_index), inside))
    return wanted


def _joined(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of all ranks: sums added, maxima compared, statistics read."""
    metrics: dict[str, float] = {}
    for result in results:
        for name, value in result["sums"].items():
            metrics[name] = metrics.get(name, 0.0) + value
        for name, value in result["maxima"].items():
            metrics[name] = max(metrics.get(name, value), value)
    return metrics | read_all([result["statistics"] for result in results])
