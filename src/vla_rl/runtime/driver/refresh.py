"""The driver's part of values and log-probs of the newest weights: which samples need them, in which batches, on which
learner (`scoring.py` is the learners')."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vla_rl.core.types import Array, Rollout
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.driver.assembler import RolloutBatch, SampleIndex, find_samples
from vla_rl.runtime.messages.ids import SampleId
from vla_rl.runtime.messages.learning import SampleRefs, ScoreRequest


def refreshed(
    fleet: Fleet, chosen: RolloutBatch, *, values: Array, log_probs: Array, version: int, size: int | None
) -> Rollout:
    """The rollout, with what the learners' weights say of it.

    Args:
        chosen: with `ranks`.
        values: bool [N], columns that get `values` and `next_values` anew.
        log_probs: bool [N], columns whose `fresh_log_probs` are computed where another version chose the chunk; all
            others are those recorded.
        version: of these weights.
        size: samples of a batch; None: what was one inference is one batch again, so that numbers are those of a policy
            that computes them itself.
    """
    rollout, samples = chosen.rollout, find_samples(chosen.rollout, np.arange(len(chosen.numbers)), chosen)
    at = samples.steps, samples.columns
    assert chosen.ranks is not None
    ended = np.zeros(len(samples.steps), bool) if chosen.ended is None else chosen.ended[at]
    old = log_probs[samples.columns] & (rollout.versions.numpy()[at] != version)
    inferences = SampleId.inferences(samples.places, samples.workers)
    scored = old if size else np.isin(inferences, inferences[old])
    masks = (values[samples.columns], values[samples.columns] & ended, scored)
    parts = [_batches(mask, samples, chosen.ranks[at], len(fleet.learners), size) for mask in masks]
    passes = tuple(max(map(len, of_ranks)) for of_ranks in parts)
    if not any(passes):
        return rollout

    def named(part: Array) -> SampleRefs:
        return samples.workers[part], samples.places[part]

    recorded = rollout.log_probs.numpy()[at]
    asked = [
        ScoreRequest(
            values=[named(part) for part in of_values],
            finals=[named(part) for part in of_finals],
            log_probs=[(named(part), recorded[part]) for part in of_log_probs],
            passes=passes,  # type: ignore[arg-type]
        )
        for of_values, of_finals, of_log_probs in zip(*parts, strict=True)
    ]
    calls = [
        learner.call(LearnerInterface.score, of_rank) for learner, of_rank in zip(fleet.learners, asked, strict=True)
    ]
    changed = {name: getattr(rollout, name).clone() for name in ("values", "next_values") if any(masks[0])}
    changed |= {"fresh_log_probs": rollout.log_probs.clone()} if any(scored) else {}
    for rank, found in enumerate(fleet.get_all(calls)):
        of_rank = (found.values, found.next_values, found.log_probs)
        for name, batches, arrays in zip(("values", "next_values", "fresh_log_probs"), parts, of_rank, strict=True):
            for part, array in zip(batches[rank], arrays, strict=True):
                new = old[part] if name == "fresh_log_probs" else np.ones(len(part), bool)
                changed[name][samples.steps[part[new]], samples.columns[part[new]]] = torch.from_numpy(array[new])
    return rollout.evolve(**changed)


def _batches(mask: Array, samples: SampleIndex, ranks: Array, world: int, size: int | None) -> Sequence[list[Array]]:
    """Of each rank, batches of the samples in `mask` (bool [S]): indices, by worker and place."""
    order = np.lexsort((samples.places, samples.workers))
    order = order[mask[order]]
    inferences = SampleId.inferences(samples.places, samples.workers)
    found = []
    for rank in range(world):
        own = order[ranks[order] == rank]
        cuts = np.arange(size, len(own), size) if size else np.flatnonzero(np.diff(inferences[own])) + 1
        found.append([part for part in np.split(own, cuts) if len(part)])
    return found
