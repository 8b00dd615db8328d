"""Streaming update, the driver's half: collected groups are scored, and learners run their passes over them, while the
rest of the step is rolled out. The optimiser steps once all groups are there.

Samples go to the learners in the order of their tickets and in full micro-batches of all ranks. So the micro-batches do
not depend on the order in which tickets are collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, evolve, field

from vla_rl.core.errors import PluginError
from vla_rl.core.fields import ADVANTAGES
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.run.selection import select_trajectories, take_columns
from vla_rl.core.trainers import OptimizerStep
from vla_rl.core.types import Advantages, Array, Rollout
from vla_rl.runtime.comm.backend import Ref
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.driver.collecting.assembler import (
    RolloutBatch,
    RolloutSamples,
    all_samples,
    assemble_rollout,
    find_samples,
    join_batches,
)
from vla_rl.runtime.driver.reports.trace import traced
from vla_rl.runtime.driver.training.update import StepUpdate, log_warnings, update_metrics


class MicroBatchStream:
    """Samples that learners run their forward and backward passes on, while the step is still incomplete."""

    def __init__(self, fleet: Fleet, micro_batch: int) -> None:
        self.fleet = fleet
        self.micro_batch = micro_batch
        self.size = micro_batch * len(fleet.learners)
        """Samples of one micro-batch of every rank."""
        self.calls: list[Ref[None]] = []
        """Calls of the running step."""
        self._unsent: list[RolloutSamples] = []
        """Samples that no learner has yet: too few for a micro-batch of every rank."""

    def queue_samples(self, samples: RolloutSamples) -> None:
        """Add samples, and send as many full micro-batches of every rank as there are. Does not wait."""
        self._unsent.append(samples)
        count = sum(map(len, self._unsent)) // self.size * self.size
        if count:
            unsent = RolloutSamples.concat(self._unsent)
            self._send_samples(unsent.take(slice(count)))
            self._unsent = [unsent.take(slice(count, None))]

    def send_last(self, samples: RolloutSamples) -> None:
        """Send the last samples of the step, with those that are left. Does not wait."""
        self._send_samples(RolloutSamples.concat([*self._unsent, samples]))

    def reset(self) -> None:
        """Forget the step, which is over."""
        self.calls = []
        self._unsent = []

    def _send_samples(self, samples: RolloutSamples) -> None:
        """Send samples to the learners, which run their passes as soon as they are free."""
        batches_of_ranks = round_robin(len(samples), len(self.fleet.learners), self.micro_batch)
        passes = max(map(len, batches_of_ranks))
        first = not self.calls
        for learner, batches in zip(self.fleet.learners, batches_of_ranks, strict=True):
            shard = samples.take(np.concatenate([np.zeros(0, np.int64), *batches]))
            ends = np.cumsum([len(batch) for batch in batches])[:-1]
            micro_batches = np.split(np.arange(len(shard)), ends) if batches else []
            method = LearnerInterface.forward_backward
            version = self.fleet.version
            self.calls.append(learner.call(method, version, shard.refs, shard.fields, micro_batches, passes, first))


def round_robin(count: int, world: int, micro_batch: int) -> list[list[Array]]:
    """Distribute samples 0 .. count - 1 round-robin: micro-batches of each rank, int64 [B] each."""
    parts = [np.arange(start, min(start + micro_batch, count)) for start in range(0, count, micro_batch)]
    return [parts[rank::world] for rank in range(world)]


@define(eq=False, slots=False)
class StreamingUpdate(StepUpdate):
    """Update that begins with the first groups of a step while others are still rolled out."""

    algorithm: Algorithm = field(kw_only=True)
    _scored_tickets: list[int] = field(factory=list, init=False)
    """Tickets of the running step whose groups were scored already; they are its first ones."""
    _scored_parts: list[RolloutBatch] = field(factory=list, init=False)
    """Rollouts that the filters left of each scored part."""
    _scored_samples: list[RolloutSamples] = field(factory=list, init=False)
    """Samples of each scored part."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.stream = MicroBatchStream(self.fleet, self.spec.train.micro_batch)

    def begin(self, step: int, tickets: Sequence[int]) -> None:
        """Score the new groups, once they fill a micro-batch of every rank, and let learners begin. Does not wait."""
        unscored = tickets[len(self._scored_tickets) :]
        trajectories = [self.collector.trajectories[number] for number in unscored]
        samples = sum(len(trajectory.policy_part["versions"]) for _, trajectory in trajectories)
        if samples >= self.stream.size:
            self.score_groups(step, unscored)

    @traced
    def score_groups(self, step: int, tickets: Sequence[int]) -> None:
        """Score the groups of these tickets, and let learners begin with them. Does not wait."""
        trajectories = [self.collector.trajectories[number] for number in tickets]
        batch = assemble_rollout(step, trajectories, self.spec.rollout.group_size)
        self._scored_tickets += batch.numbers.tolist()
        rollout, keep = select_trajectories(batch.rollout, self.algorithm)
        columns = keep.nonzero().flatten().numpy()
        if not len(columns):
            return
        part = self._prepare_part(batch, take_columns(rollout, columns), columns)
        samples = all_samples(part, self.algorithm.advantages(part.rollout)).in_ticket_order()
        self._scored_parts.append(part)
        self._scored_samples.append(samples)
        self.stream.queue_samples(samples)

    def prepare_batch(self, batch: RolloutBatch, selected: Rollout, columns: Array) -> RolloutBatch:
        """Return what is trained on, moved to the learners: the columns (indices) of a step's rollout in `selected`.
        Raises PluginError where filters kept other trajectories of the parts than of the whole step."""
        tickets = batch.numbers[columns]
        scored = np.isin(tickets, self._scored_tickets)
        kept_in_parts = [number for part in self._scored_parts for number in part.numbers.tolist()]
        if tickets[scored].tolist() != kept_in_parts:
            raise self._scope_error(OTHER_SELECTION)
        parts = list(self._scored_parts)
        remaining = np.flatnonzero(~scored)
        if len(remaining):
            parts.append(self._prepare_part(batch, take_columns(selected, remaining), columns[remaining]))
        prepared = join_batches(parts)
        return evolve(prepared, rollout=prepared.rollout.evolve(episodes=batch.rollout.episodes))

    def run_update(self, prepared: RolloutBatch, advantages: Advantages) -> dict[str, float]:
        """Send the learners the samples that they lack, and let them make the optimiser steps. Return metrics. Raises
        PluginError where parts got other scores than the whole step."""
        samples = all_samples(prepared, advantages).in_ticket_order()
        epochs = self.spec.train.epochs
        scored = self._scored_count
        if scored:
            parts = RolloutSamples.concat(self._scored_samples)
            check_parts(self.spec.algorithm.type, self.algorithm, parts, samples)
        self.stream.send_last(samples.take(slice(scored, None)))
        divisor = samples.sum_field("counts")
        value_divisor = samples.sum_field("value_counts")
        first = OptimizerStep(
            micro_batches=(), passes=0, divisor=divisor, value_divisor=value_divisor, accumulated=True
        )
        steps = [first, *[evolve(first, accumulated=False)] * (epochs - 1)]
        nothing = np.zeros(0, np.int64), np.zeros(0, np.int64)
        pending = [
            learner.call(LearnerInterface.update, prepared.rollout.step, nothing, {}, steps)
            for learner in self.fleet.learners
        ]
        calls: list[Ref[Any]] = [*self.stream.calls, *pending]
        results = self.collector.wait_for(calls)[len(self.stream.calls) :]
        log_warnings(prepared.rollout.step, results)
        return update_metrics(len(samples), epochs, results)

    def finish_update(self, trained: bool) -> None:
        """End the step. Raises PluginError where `select` kept samples of parts and nothing of the whole step."""
        scored = self._scored_count
        self._scored_tickets = []
        self._scored_parts = []
        self._scored_samples = []
        self.stream.reset()
        if scored and not trained:
            raise self._scope_error(f"`select` keeps nothing of the whole step, and kept {scored} samples of parts")

    @property
    def _scored_count(self) -> int:
        """Number of samples that were scored before the step was complete."""
        return sum(map(len, self._scored_samples))

    def _prepare_part(self, batch: RolloutBatch, selected: Rollout, columns: Array) -> RolloutBatch:
        """Prepare columns of the step; samples are distributed to ranks by their position in the step."""
        samples = find_samples(selected, columns, batch)
        order = np.lexsort((samples.steps, samples.columns))
        positions = self._scored_count + np.arange(len(order))
        ranks = np.empty(len(samples.steps), np.int64)
        ranks[order] = positions // self.spec.train.micro_batch % len(self.fleet.learners)
        return self.router.prepare_samples(batch, selected, columns, ranks)

    def _scope_error(self, reason: str) -> PluginError:
        return scope_error(self.spec.algorithm.type, reason)


TOLERANCE = 1e-3
"""Tolerance of the comparison between parts and the whole step, relative to the largest value. Sums of rewards are
rounded differently where trajectories are longer, and the division by a small standard deviation amplifies that."""
OTHER_SELECTION = "`select` keeps other trajectories of the whole step than of parts of it"


def check_parts(name: str, algorithm: Algorithm, parts: RolloutSamples, step: RolloutSamples) -> None:
    """Raise PluginError unless parts are the step's first samples, with equal scores. `name`: the algorithm's type."""
    count = len(parts)
    same = count <= len(step) and all(
        np.array_equal(getattr(parts, key), getattr(step, key)[:count]) for key in ("numbers", "steps")
    )
    if not same:
        raise scope_error(name, OTHER_SELECTION)
    for key in (*(one.name for one in ADVANTAGES if one.in_batch), *algorithm.extras):
        of_parts = parts.fields[key]
        of_step = step.fields[key]
        if of_parts is None and of_step is None:
            continue
        if of_parts is None or of_step is None:
            raise scope_error(name, f"there are {key} of the whole step or of its parts, and not of both")
        largest = float(np.abs(of_step).max(initial=0.0))
        difference = float(np.abs(of_parts - of_step[:count]).max(initial=0.0))
        if difference > TOLERANCE * largest:
            raise scope_error(name, f"{key} of parts differ by up to {difference:.3g} from those of the whole step")


def scope_error(name: str, reason: str) -> PluginError:
    """Return the error for an algorithm of this type that scores parts of a step differently."""
    return PluginError(
        f"algorithm {name!r} says advantage_scope GROUP, and needs other groups: {reason} (or a wrapper around it "
        f"does); the weights are unchanged. Set advantage_scope = AdvantageScope.STEP in it, or "
        f"asynchrony.streaming_update: false"
    )
