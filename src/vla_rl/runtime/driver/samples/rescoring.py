"""Recomputation of values and log-probs with the newest weights: the driver decides which samples need them, in which
batches and on which learner. `scoring.py` is the learners' half."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vla_rl.core.types import Array, Rollout
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, RolloutSamples, all_samples
from vla_rl.runtime.messages.ids import SampleId
from vla_rl.runtime.messages.learning import ScoreRequest


def rescore_rollout(
    fleet: Fleet, batch: RolloutBatch, *, values: Array, log_probs: Array, version: int, size: int | None
) -> Rollout:
    """Return the rollout with recomputed values and log-probs.

    Args:
        batch: the rollout batch, with `ranks`.
        values: bool [N], columns whose `values` and `next_values` are recomputed.
        log_probs: bool [N], columns whose `proximal_log_probs` are computed where another version chose the chunk; all
            others equal the recorded ones.
        version: version of the learners' weights.
        size: samples of a batch; None: samples of one inference form one batch again, so that the numbers equal those
            of a policy that computes them itself.
    """
    rollout = batch.rollout
    samples = all_samples(batch)
    index = samples.steps, samples.columns
    assert batch.ranks is not None
    ended = np.zeros(len(samples.steps), bool) if batch.ended is None else batch.ended[index]
    stale = log_probs[samples.columns] & (rollout.versions.numpy()[index] != version)
    inferences = SampleId.inference_keys(samples.sample_ids, samples.workers)
    scored = stale if size else np.isin(inferences, inferences[stale])
    masks = (values[samples.columns], values[samples.columns] & ended, scored)
    parts = [_split_batches(mask, samples, batch.ranks[index], len(fleet.learners), size) for mask in masks]
    passes = tuple(max(map(len, of_ranks)) for of_ranks in parts)
    if not any(passes):
        return rollout

    recorded = rollout.log_probs.numpy()[index]
    requests = [
        ScoreRequest(
            values=[samples.take(part).refs for part in value_parts],
            finals=[samples.take(part).refs for part in final_parts],
            log_probs=[(samples.take(part).refs, recorded[part]) for part in log_prob_parts],
            passes=passes,  # type: ignore[arg-type]
        )
        for value_parts, final_parts, log_prob_parts in zip(*parts, strict=True)
    ]
    calls = [
        learner.call(LearnerInterface.score_samples, request)
        for learner, request in zip(fleet.learners, requests, strict=True)
    ]
    changed = {name: getattr(rollout, name).clone() for name in ("values", "next_values") if any(masks[0])}
    if any(scored):
        changed["proximal_log_probs"] = rollout.log_probs.clone()
    for rank, scores in enumerate(fleet.get_all(calls)):
        arrays_of_fields = (scores.values, scores.next_values, scores.log_probs)
        names = ("values", "next_values", "proximal_log_probs")
        for name, batches, arrays in zip(names, parts, arrays_of_fields, strict=True):
            for part, array in zip(batches[rank], arrays, strict=True):
                new = stale[part] if name == "proximal_log_probs" else np.ones(len(part), bool)
                changed[name][samples.steps[part[new]], samples.columns[part[new]]] = torch.from_numpy(array[new])
    return rollout.evolve(**changed)


def _split_batches(
    mask: Array, samples: RolloutSamples, ranks: Array, world: int, size: int | None
) -> Sequence[list[Array]]:
    """Return the batches of each rank: indices of the samples in `mask` (bool [S]), sorted by worker and sample id."""
    order = np.lexsort((samples.sample_ids, samples.workers))
    order = order[mask[order]]
    inferences = SampleId.inference_keys(samples.sample_ids, samples.workers)
    batches = []
    for rank in range(world):
        of_rank = order[ranks[order] == rank]
        cuts = np.arange(size, len(of_rank), size) if size else np.flatnonzero(np.diff(inferences[of_rank])) + 1
        batches.append([part for part in np.split(of_rank, cuts) if len(part)])
    return batches
