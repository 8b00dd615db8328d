"""Streaming update, the driver's half: collected groups are scored, and learners run their passes over them, while the
rest of the step is rolled out. The optimiser steps once all groups are there.

Samples go to the learners in the order of their tickets and in full micro-batches of all ranks. So the micro-batches do
not depend on the order in which tickets are collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import evolve

from vla_rl.core.errors import PluginError
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.run.selection import select_trajectories, take_columns
from vla_rl.core.spec.spec import Spec
from vla_rl.core.trainers import OptimizerStep
from vla_rl.core.types import Advantages, Array, Rollout
from vla_rl.runtime.comm.backend import Ref
from vla_rl.runtime.comm.interfaces import LearnerInterface
from vla_rl.runtime.driver.collecting.assembler import (
    RolloutBatch,
    RolloutSamples,
    all_samples,
    assemble_rollout,
    find_samples,
    join_batches,
)
from vla_rl.runtime.driver.collecting.rollouts import StepRollouts
from vla_rl.runtime.driver.reports.trace import Trace, traced
from vla_rl.runtime.driver.samples.micro_batch_stream import MicroBatchStream
from vla_rl.runtime.driver.samples.sample_router import SampleRouter
from vla_rl.runtime.driver.training.part import StepPart
from vla_rl.runtime.driver.training.scope_check import OTHER_SELECTION, check_parts, scope_error
from vla_rl.runtime.driver.training.update import StepUpdate, log_warnings, update_metrics


class StreamingUpdate(StepUpdate):
    """Update that begins with the first groups of a step while others are still rolled out."""

    def __init__(
        self,
        spec: Spec,
        algorithm: Algorithm,
        rollouts: StepRollouts,
        router: SampleRouter,
        parts: Sequence[StepPart],
        trace: Trace,
    ) -> None:
        super().__init__(spec, rollouts, router, parts, trace)
        self.algorithm = algorithm
        self.stream = MicroBatchStream(self.fleet, spec.train.micro_batch)
        self._scored_tickets: list[int] = []
        """Tickets of the running step whose groups were scored already; they are its first ones."""
        self._scored_parts: list[RolloutBatch] = []
        """Rollouts that the filters left of each scored part."""
        self._scored_samples: list[RolloutSamples] = []
        """Samples of each scored part."""

    def begin(self, step: int, tickets: Sequence[int]) -> None:
        """Score the groups that are not scored yet, once they fill a micro-batch of every rank, and let learners begin
        with them. Does not wait.
        """
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
        """Return what is trained on, moved to the learners: the columns (indices) of a step's rollout that `selected`
        consists of.

        Raises PluginError where filters kept other trajectories of the parts than of the whole step.
        """
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
        """Send the learners the samples that they do not have yet, and let them make the optimiser steps. Return
        metrics.

        Raises PluginError where parts got other scores than the whole step.
        """
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
        """Reset the state, as the step is over. Raises PluginError where `select` kept samples of parts and nothing of
        the whole step.
        """
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
