"""From samples that lie with learners, and their advantages, to trained weights: which rank trains on which of them in
which optimiser step, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, Array
from vla_rl.runtime.comm.backend import Ref
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import HostInterface
from vla_rl.runtime.driver.assembler import RolloutBatch, SampleIndex, find_samples, light_arrays
from vla_rl.runtime.driver.minibatches import RankShard, split_into_minibatches
from vla_rl.toolkit.algorithms.statistics import read_all

Result = dict[str, Any]
"""As `LearnerRole.update` gives it."""


def update(
    fleet: Fleet,
    spec: Spec,
    chosen: RolloutBatch,
    advantages: Advantages,
    wait: Callable[[Sequence[Ref[Result]]], list[Result]],
) -> dict[str, float]:
    """Train on all of `chosen`, which lies with the learners. -> metrics.

    Args:
        wait: for the results of all learners.
    """
    samples = find_samples(chosen.rollout, np.arange(len(chosen.numbers)), chosen)
    light = light_arrays(chosen.rollout, advantages, samples)
    assert chosen.ranks is not None
    shares = _shares(fleet, spec, chosen.rollout.step, samples, chosen.ranks[samples.steps, samples.columns], light)
    pending = []
    for learner, share in zip(fleet.learners, shares, strict=True):
        of_rank = {name: None if array is None else array[share.samples] for name, array in light.items()}
        named = samples.workers[share.samples], samples.places[share.samples]
        worker = fleet.worker_of(learner)
        pending.append(worker.call(HostInterface.update, chosen.rollout.step, named, of_rank, share.steps))
    results = wait(pending)
    return {
        "update/samples": float(len(samples.steps)),
        "update/optimizer_steps": float(len(shares[0].steps)),
        **merged(results),
        "time/learner": max(result["seconds"] for result in results),
    }


def _shares(
    fleet: Fleet, spec: Spec, step: int, samples: SampleIndex, ranks: Array, light: dict[str, Array | None]
) -> list[RankShard]:
    """What each rank (`ranks`, int64 [S]) trains on: what its own policy made first, then what others did, each in the
    order in which it lay there."""
    home = np.array([learner.worker for learner in fleet.learners])
    source = np.where(samples.workers == home[ranks], 0, samples.workers + 1)
    order = np.empty(len(ranks), np.int64)
    order[np.lexsort((samples.places, source))] = np.arange(len(ranks))
    return split_into_minibatches(
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


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of all ranks: sums added, maxima compared, statistics read."""
    metrics: dict[str, float] = {}
    for result in results:
        for name, value in result["sums"].items():
            metrics[name] = metrics.get(name, 0.0) + value
        for name, value in result["maxima"].items():
            metrics[name] = max(metrics.get(name, value), value)
    return metrics | read_all([result["statistics"] for result in results])
