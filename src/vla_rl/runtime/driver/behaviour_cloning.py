"""Behaviour cloning on all learners: before RL (`bc_warmup:`), and `vla-rl sft`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.randomness import generator
from vla_rl.core.spec.sections import ExpertSpec
from vla_rl.core.spec.spec import Spec
from vla_rl.core.trainers import ImitationStep
from vla_rl.core.types import Array
from vla_rl.runtime.comm.handles import Fleet, by_reference
from vla_rl.runtime.comm.interfaces import EnvInterface, LearnerInterface

OnProgress = Callable[[str, int, int], None]
STEPS_PER_CALL = 10
"""Optimiser steps of one call. A run can be stopped between two calls."""


class ImitationTrainer:
    """Behaviour cloning of demonstrations that the learners hold; deterministic in seed and step."""

    def __init__(
        self, fleet: Fleet, seed: int, purpose: str, batch: int, samples: Sequence[Array], metrics: dict[str, float]
    ):
        """Describe the demonstrations.

        Args:
            seed, purpose: key of the order of samples.
            batch: samples of an optimiser step, over all ranks.
            samples: int64 [n] for each rank: indices of its samples.
            metrics: metrics of the demonstrations.
        """
        self.metrics = metrics
        self._fleet = fleet
        self._seed = seed
        self._purpose = purpose
        self._samples = samples
        self._rank_batch = max(1, batch // len(samples))
        self.steps_per_epoch = max(-(-len(rank_samples) // self._rank_batch) for rank_samples in samples)
        """Optimiser steps of one pass over the demonstrations."""

    def batch_size(self, step: int) -> int:
        """Return the samples of an optimiser step (from 1), over all ranks. The last step of an epoch has what is
        left.
        """
        start = (step - 1) % self.steps_per_epoch * self._rank_batch
        return sum(min(max(len(rank_samples) - start, 0), self._rank_batch) for rank_samples in self._samples)

    def train(
        self, first: int, last: int, lr: Callable[[int], float], on_step: Callable[[int], None]
    ) -> dict[str, float]:
        """Make optimiser steps `first` to `last` (from 1, inclusive). Return the trainer's metrics: means over samples
        of its sums, such as "loss/imitation", and its maxima.

        Args:
            lr: optimiser step -> its learning rate.
            on_step: called with the next optimiser step.
        """
        totals: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for start in range(first, last + 1, STEPS_PER_CALL):
            on_step(start)
            end = min(start + STEPS_PER_CALL, last + 1)
            steps = [self.split(step, lr(step)) for step in range(start, end)]
            pending = [
                learner.call(LearnerInterface.behaviour_cloning_update, [shards[rank] for shards in steps])
                for rank, learner in enumerate(self._fleet.learners)
            ]
            results = self._fleet.get_all(pending)
            for name in results[0].sums:
                totals[name] = totals.get(name, 0.0) + sum(result.sums[name] for result in results)
            for name in results[0].maxima:
                maxima[name] = max(maxima.get(name, -math.inf), *(result.maxima[name] for result in results))
        samples = sum(map(self.batch_size, range(first, last + 1)))
        return {name: total / samples for name, total in totals.items()} | maxima

    def split(self, step: int, lr: float) -> list[ImitationStep]:
        """Return the shard of each rank in an optimiser step (from 1)."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        shards = []
        for rank, rank_samples in enumerate(self._samples):
            order = generator(self._seed, self._purpose, rank, epoch).permutation(len(rank_samples))
            shards.append(rank_samples[order[position * self._rank_batch : (position + 1) * self._rank_batch]])
        total = self.batch_size(step)
        largest_shard = max(map(len, shards))
        return [ImitationStep(indices=shard, total=total, most=largest_shard, lr=lr) for shard in shards]


def start_behaviour_cloning(
    fleet: Fleet, spec: Spec, recorded_samples: int, on_progress: OnProgress
) -> ImitationTrainer:
    """Return the demonstrations of the spec's `imitation:`, ready to train on. `recorded_samples`: samples of the data
    that the learners opened.
    """
    section = spec.imitation
    assert section is not None
    if section.expert is None:
        return _clone_data(fleet, spec, recorded_samples, "imitation", section.batch)
    on_progress("demonstrations", 0, section.expert.episodes)
    return _clone_expert(fleet, spec, section.expert, "imitation", section.batch)


def bc_warmup(fleet: Fleet, spec: Spec, on_progress: OnProgress) -> dict[str, float]:
    """Clone the simulator's scripted expert on all learners, as `bc_warmup:` says, and forget the demonstrations and
    the optimiser's state before RL. Return metrics.
    """
    section = spec.bc_warmup
    assert section is not None
    on_progress("demonstrations", 0, section.episodes)
    cloning = _clone_expert(fleet, spec, section, "warm-up", section.batch)
    steps_per_epoch = cloning.steps_per_epoch
    metrics: dict[str, float] = {}
    for epoch in range(section.epochs):
        metrics = cloning.train(
            epoch * steps_per_epoch + 1,
            (epoch + 1) * steps_per_epoch,
            lambda step: section.lr,
            lambda step: on_progress("bc_warmup", (step - 1) // steps_per_epoch, section.epochs),
        )
    fleet.get_all([learner.call(LearnerInterface.forget_demonstrations) for learner in fleet.learners])
    return {
        "bc_warmup/samples": cloning.metrics["imitation/samples"],
        "bc_warmup/expert_success": cloning.metrics["imitation/expert_success"],
        "bc_warmup/loss": metrics["loss/imitation"],
    }


def _clone_expert(fleet: Fleet, spec: Spec, expert: ExpertSpec, purpose: str, batch: int) -> ImitationTrainer:
    """Let the simulators' scripted expert act on all lanes. Its samples stay with the learner of the same worker, if
    there is one.

    Raises UserError when no episode succeeded.
    """
    per_lane = -(-expert.episodes // len(fleet.lanes))
    calls = {
        lane.index: fleet.sim_of[lane.index].call_for_two(EnvInterface.demonstrate, lane.index, per_lane, expert.noise)
        for lane in fleet.lanes
    }
    counts = {lane: fleet.get(lane_counts) for lane, (_, lane_counts) in calls.items()}
    samples, successes, tries = (sum(lane_counts[i] for lane_counts in counts.values()) for i in range(3))
    if not samples:
        raise UserError(f"the expert of env {spec.env.type!r} solved none of {tries} episodes; nothing to clone")
    lanes_of_ranks: list[list[int]] = [[] for _ in fleet.learners]
    for i, lane in enumerate(fleet.lanes):
        sim_worker = fleet.sim_of[lane.index].worker
        ranks = [rank for rank, learner in enumerate(fleet.learners) if learner.worker == sim_worker]
        lanes_of_ranks[ranks[0] if ranks else i % len(lanes_of_ranks)].append(lane.index)
    fleet.get_all(
        [
            learner.call(LearnerInterface.set_demonstrations, *(by_reference(calls[lane][0]) for lane in lanes))
            for learner, lanes in zip(fleet.learners, lanes_of_ranks, strict=True)
        ]
    )
    sizes = [sum(counts[lane][0] for lane in lanes) for lanes in lanes_of_ranks]
    metrics = {"imitation/samples": float(samples), "imitation/expert_success": successes / tries}
    return ImitationTrainer(fleet, spec.seed, purpose, batch, [np.arange(size) for size in sizes], metrics)


def _clone_data(fleet: Fleet, spec: Spec, count: int, purpose: str, batch: int) -> ImitationTrainer:
    """Use `count` samples of recorded demonstrations, which every learner has opened; each rank takes its share."""
    world = len(fleet.learners)
    samples = [np.arange(rank, count, world) for rank in range(world)]
    return ImitationTrainer(fleet, spec.seed, purpose, batch, samples, {"imitation/samples": float(count)})
