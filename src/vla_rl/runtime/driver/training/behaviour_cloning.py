"""Behaviour cloning on all learners: before RL (`bc_warmup:`), and `vla-rl sft`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import define, frozen

from vla_rl.core.augmentation import AugmentSpec
from vla_rl.core.errors import UserError
from vla_rl.core.randomness import generator
from vla_rl.core.spec.sections import WEIGHT_PARTS, ExpertSpec, ImitationSpec
from vla_rl.core.spec.spec import Spec
from vla_rl.core.trainers import ImitationStep
from vla_rl.core.types import Array, Statistic
from vla_rl.runtime.comm.handles import Fleet, by_reference
from vla_rl.runtime.comm.interfaces import EnvInterface, LearnerInterface
from vla_rl.runtime.driver.training.update import log_warnings
from vla_rl.toolkit.algorithms.statistics import read_all


class SampleOrder(ABC):
    """Order of one rank's samples."""

    steps_per_epoch: int
    """Optimiser steps of one pass over the demonstrations; with several data sets, over the first."""

    @abstractmethod
    def sample_count(self, step: int) -> int:
        """Return the number of samples of an optimiser step (from 1)."""

    @abstractmethod
    def batch_indices(self, step: int) -> Array:
        """Return the indices, int64 [size], of an optimiser step's samples."""


@frozen(eq=False)
class Epochs(SampleOrder):
    """All samples once an epoch, in another order each time. The last step of an epoch has what is left."""

    _seed: int
    _purpose: str
    _rank: int
    _samples: Array
    """int64 [n], the rank's indices."""
    _batch: int
    """Samples of an optimiser step."""
    steps_per_epoch: int
    """Optimiser steps of the rank with the most samples."""

    def sample_count(self, step: int) -> int:
        start = (step - 1) % self.steps_per_epoch * self._batch
        return min(max(len(self._samples) - start, 0), self._batch)

    def batch_indices(self, step: int) -> Array:
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        order = generator(self._seed, self._purpose, self._rank, epoch).permutation(len(self._samples))
        return self._samples[order[position * self._batch : (position + 1) * self._batch]]


class Mixture(SampleOrder):
    """Samples of several data sets by their weights. Each data set has separate epochs; every step is full. At any
    moment the number of samples of a data set differs by a few from its share."""

    def __init__(
        self, seed: int, purpose: str, rank: int, samples: Sequence[Array], weights: Sequence[float], batch: int
    ) -> None:
        """Describe the order.

        Args:
            samples: int64 [n] for each data set: the rank's indices.
            weights: share of each data set; their sum is 1.
            batch: samples of an optimiser step.
        """
        self._seed = seed
        self._purpose = purpose
        self._rank = rank
        self._samples = samples
        self._batch = batch
        self._parts = np.rint(np.array(weights) * WEIGHT_PARTS).astype(np.int64)
        """Samples of each data set in a round of `WEIGHT_PARTS` samples."""
        self.steps_per_epoch = max(1, round(len(samples[0]) / (batch * weights[0])))

    def sample_count(self, step: int) -> int:
        return self._batch

    def batch_indices(self, step: int) -> Array:
        first, last = (step - 1) * self._batch, step * self._batch
        sets, numbers = [], []
        for number in range(first // WEIGHT_PARTS, (last - 1) // WEIGHT_PARTS + 1):
            start = number * WEIGHT_PARTS
            chosen = slice(max(first - start, 0), min(last - start, WEIGHT_PARTS))
            set_of, number_of = self._draw_round(number)
            sets.append(set_of[chosen])
            numbers.append(number_of[chosen])
        set_of, number_of = np.concatenate(sets), np.concatenate(numbers)
        indices = np.empty(self._batch, np.int64)
        for data_set, samples in enumerate(self._samples):
            rows = np.flatnonzero(set_of == data_set)
            epochs, positions = np.divmod(number_of[rows], len(samples))
            for epoch in np.unique(epochs):
                now = epochs == epoch
                key = f"{self._purpose}/data set {data_set}"
                order = generator(self._seed, key, self._rank, int(epoch)).permutation(len(samples))
                indices[rows[now]] = samples[order[positions[now]]]
        return indices

    def _draw_round(self, number: int) -> tuple[Array, Array]:
        """Return the data set of each sample of a round, and the sample's number within its data set, int64
        [WEIGHT_PARTS] each. Samples of a data set are about evenly spaced."""
        set_of = np.repeat(np.arange(len(self._parts)), self._parts)
        within = np.concatenate([np.arange(count) for count in self._parts])
        jitter = generator(self._seed, f"{self._purpose}/mixture", self._rank, number).random(WEIGHT_PARTS)
        order = np.argsort((within + jitter) / self._parts[set_of])
        return set_of[order], (number * self._parts[set_of] + within)[order]


OnProgress = Callable[[str, int, int], None]
STEPS_PER_CALL = 10
"""Optimiser steps of one call. A run can be stopped between two calls."""


@define(eq=False)
class ImitationTrainer:
    """Behaviour cloning of demonstrations that the learners hold; deterministic in seed and step."""

    _fleet: Fleet
    _orders: Sequence[SampleOrder]
    """Order of the samples of each rank."""
    metrics: dict[str, float]
    """Metrics of the demonstrations."""
    _augment: AugmentSpec | None = None
    """Random changes to the images, by numbers of `seed`; None: none."""
    _seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one pass over the demonstrations; with several data sets, over the first."""
        return self._orders[0].steps_per_epoch

    def batch_size(self, step: int) -> int:
        """Return the samples of an optimiser step (from 1), over all ranks."""
        return sum(order.sample_count(step) for order in self._orders)

    def train(
        self, first: int, last: int, lr: Callable[[int], float], on_step: Callable[[int], None]
    ) -> dict[str, float]:
        """Make optimiser steps `first` to `last` (from 1, inclusive). Return the trainer's metrics: means over samples
        of its sums, such as "loss/imitation", its maxima and its statistics.

        Args:
            lr: optimiser step -> its learning rate.
            on_step: called with the next optimiser step.
        """
        totals: dict[str, float] = {}
        maxima: dict[str, float] = {}
        statistics: list[Mapping[str, Statistic]] = []
        for start in range(first, last + 1, STEPS_PER_CALL):
            on_step(start)
            end = min(start + STEPS_PER_CALL, last + 1)
            steps = [self.split_step(step, lr(step)) for step in range(start, end)]
            pending = [
                learner.call(LearnerInterface.behaviour_cloning_update, [shards[rank] for shards in steps])
                for rank, learner in enumerate(self._fleet.learners)
            ]
            results = self._fleet.get_all(pending)
            log_warnings(end - 1, results)
            for name in results[0].sums:
                totals[name] = totals.get(name, 0.0) + sum(result.sums[name] for result in results)
            for name in results[0].maxima:
                maxima[name] = max(maxima.get(name, -math.inf), *(result.maxima[name] for result in results))
            statistics += [result.statistics for result in results]
        samples = sum(map(self.batch_size, range(first, last + 1)))
        return {name: total / samples for name, total in totals.items()} | maxima | read_all(statistics)

    def split_step(self, step: int, lr: float) -> list[ImitationStep]:
        """Return the shard of each rank in an optimiser step (from 1)."""
        shards = [order.batch_indices(step) for order in self._orders]
        sizes = [len(shard) for shard in shards]
        return [
            ImitationStep(
                number=step,
                first=sum(sizes[:rank]),
                indices=shard,
                total=sum(sizes),
                most=max(sizes),
                lr=lr,
                augment=self._augment,
                seed=self._seed,
            )
            for rank, shard in enumerate(shards)
        ]


def start_behaviour_cloning(
    fleet: Fleet, spec: Spec, recorded_samples: Sequence[int], on_progress: OnProgress
) -> ImitationTrainer:
    """Return `imitation:`'s demonstrations. `recorded_samples`: samples of each data set that the learners opened."""
    section = spec.imitation
    assert section is not None
    if section.expert is None:
        return _clone_data(fleet, spec, section, recorded_samples)
    on_progress("demonstrations", 0, section.expert.episodes)
    return _clone_expert(fleet, spec, section.expert, "imitation", section.batch, section.augment)


def clone_expert(fleet: Fleet, spec: Spec, on_progress: OnProgress) -> dict[str, float]:
    """Clone the scripted expert (`bc_warmup:`), then forget demonstrations and optimiser state. Return metrics."""
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


def _clone_expert(
    fleet: Fleet, spec: Spec, expert: ExpertSpec, purpose: str, batch: int, augment: AugmentSpec | None = None
) -> ImitationTrainer:
    """Let the simulators' scripted expert act on all lanes. Samples stay with the worker's learner, if any. Raises
    UserError when no episode succeeded."""
    per_lane = -(-expert.episodes // len(fleet.lanes))
    calls = {
        lane.index: fleet.sim_of[lane.index].call_for_two(
            EnvInterface.collect_demonstrations, lane.index, per_lane, expert.noise
        )
        for lane in fleet.lanes
    }
    counts = {lane: fleet.get(lane_counts) for lane, (_, lane_counts) in calls.items()}
    samples, successes, tries = (sum(lane_counts[i] for lane_counts in counts.values()) for i in range(3))
    if not samples:
        raise UserError(f"the expert of env {spec.env.type!r} solved none of {tries} episodes; nothing to clone")
    lanes_of_ranks: list[list[int]] = [[] for _ in fleet.learners]
    for i, lane in enumerate(fleet.lanes):
        sim_worker = fleet.sim_of[lane.index].worker_index
        ranks = [rank for rank, learner in enumerate(fleet.learners) if learner.worker_index == sim_worker]
        lanes_of_ranks[ranks[0] if ranks else i % len(lanes_of_ranks)].append(lane.index)
    fleet.get_all(
        [
            learner.call(LearnerInterface.set_demonstrations, *(by_reference(calls[lane][0]) for lane in lanes))
            for learner, lanes in zip(fleet.learners, lanes_of_ranks, strict=True)
        ]
    )
    sizes = [sum(counts[lane][0] for lane in lanes) for lanes in lanes_of_ranks]
    metrics = {"imitation/samples": float(samples), "imitation/expert_success": successes / tries}
    orders = _epochs_of_ranks(spec.seed, purpose, [np.arange(size) for size in sizes], batch)
    return ImitationTrainer(fleet, orders, metrics, augment, spec.seed)


def _clone_data(fleet: Fleet, spec: Spec, section: ImitationSpec, counts: Sequence[int]) -> ImitationTrainer:
    """Use data sets with `counts` samples, which every learner has opened; each rank takes its share of each."""
    world = len(fleet.learners)
    metrics = {"imitation/samples": float(sum(counts))}
    samples = [[np.arange(rank, count, world) for rank in range(world)] for count in counts]
    if len(counts) == 1:
        epochs = _epochs_of_ranks(spec.seed, "imitation", samples[0], section.batch)
        return ImitationTrainer(fleet, epochs, metrics, section.augment, spec.seed)
    if min(counts) < world:
        raise UserError(
            f"imitation.co_training: the data sets have {', '.join(map(str, counts))} samples, and each needs one for "
            f"every one of {world} learners; leave the smallest out"
        )
    further = [part.weight for part in section.co_training]
    weights = [1 - sum(further), *further]
    starts = np.cumsum([0, *counts])
    orders = []
    for rank in range(world):
        rank_samples = [start + of_set[rank] for start, of_set in zip(starts, samples, strict=False)]
        batch = max(1, section.batch // world)
        orders.append(Mixture(spec.seed, "imitation", rank, rank_samples, weights, batch))
    return ImitationTrainer(fleet, orders, metrics, section.augment, spec.seed)


def _epochs_of_ranks(seed: int, purpose: str, samples: Sequence[Array], batch: int) -> list[Epochs]:
    """Return the order of each rank. `samples`: int64 [n] for each rank; `batch`: over all ranks."""
    rank_batch = max(1, batch // len(samples))
    steps_per_epoch = max(-(-len(rank_samples) // rank_batch) for rank_samples in samples)
    return [
        Epochs(seed, purpose, rank, rank_samples, rank_batch, steps_per_epoch)
        for rank, rank_samples in enumerate(samples)
    ]
