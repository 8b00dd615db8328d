"""Streaming update, the driver's half: finished groups are scored, and learners run their passes over them, while the
rest of the step is rolled out. The optimiser steps once all groups are there.

Samples go to the learners in the order of their tickets and in full micro-batches of all ranks. So the micro-batches do
not depend on the order in which tickets finish.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, evolve, field, frozen

from vla_rl.core.errors import PluginError
from vla_rl.core.fields import ADVANTAGES
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.run.selection import take_columns
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Advantages, Array, Rollout
from vla_rl.runtime.comm.backend import Ref
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import HostInterface
from vla_rl.runtime.driver.assembler import RolloutBatch, assemble, find_samples, joined, light_arrays
from vla_rl.runtime.driver.minibatches import round_robin
from vla_rl.runtime.driver.sample_router import SampleRouter
from vla_rl.runtime.driver.update import merged
from vla_rl.runtime.messages.learning import OptimizerStep
from vla_rl.runtime.messages.reports import TrajectoryResult

CLOSE = 1e-3
"""Tolerance of the comparison between parts and the whole step, relative to the largest value. Sums of rewards are
rounded differently where trajectories are longer, and the division by a small standard deviation amplifies that.
"""


@frozen(kw_only=True, eq=False)
class Queue:
    """S samples in the order of their tickets: arrays int64 [S] and batch fields [S, ...]."""

    numbers: Array
    steps: Array
    """Ticket of each sample, and its chunk step there."""
    workers: Array
    places: Array
    """Workers and sample ids, as in `SampleIndex`."""
    light: Mapping[str, Array | None]

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, which: Any) -> Queue:
        return Queue(
            numbers=self.numbers[which],
            steps=self.steps[which],
            workers=self.workers[which],
            places=self.places[which],
            light={name: None if array is None else array[which] for name, array in self.light.items()},
        )

    @staticmethod
    def concat(parts: Sequence[Queue]) -> Queue:
        def joined(of: Sequence[Any]) -> Any:
            return None if any(array is None for array in of) else np.concatenate(of)

        return Queue(
            numbers=joined([part.numbers for part in parts]),
            steps=joined([part.steps for part in parts]),
            workers=joined([part.workers for part in parts]),
            places=joined([part.places for part in parts]),
            light={name: joined([part.light[name] for part in parts]) for name in parts[0].light},
        )


@define(eq=False)
class StreamingUpdate:
    """State of the running step: scored parts, their samples, and those that learners do not have yet."""

    fleet: Fleet
    spec: Spec
    algorithm: Algorithm
    supply: SampleRouter
    judged: list[int] = field(factory=list, init=False)
    """Tickets of the running step whose groups were scored already; they are its first ones."""
    _parts: list[RolloutBatch] = field(factory=list, init=False)
    """Rollouts that the filters left of each scored part."""
    _queues: list[Queue] = field(factory=list, init=False)
    """Samples of each scored part."""
    _left: list[Queue] = field(factory=list, init=False)
    """Samples that no learner has yet: too few for a micro-batch of every rank."""
    _fed: list[Ref[None]] = field(factory=list, init=False)
    _begun: bool = field(default=False, init=False)

    @property
    def _size(self) -> int:
        """Return the samples of one micro-batch of every rank."""
        return self.spec.train.micro_batch * len(self.fleet.learners)

    def worthwhile(self, played: Sequence[tuple[int, TrajectoryResult]]) -> bool:
        """Return whether these further tickets fill a micro-batch of every rank."""
        return sum(len(ticket.chosen["versions"]) for _, ticket in played) >= self._size

    def feed(self, step: int, version: int, played: Sequence[tuple[int, TrajectoryResult]]) -> None:
        """Score the groups of these further tickets, and let the learners begin with them. Does not wait for the
        learners.
        """
        gathered = assemble(step, played, self.spec.rollout.group_size)
        self.judged += gathered.numbers.tolist()
        rollout = self.algorithm.shape_rewards(gathered.rollout)
        columns = self.algorithm.select(rollout).nonzero().flatten().numpy()
        if not len(columns):
            return
        part = self._prepared(version, gathered, take_columns(rollout, columns), columns)
        self._parts.append(part)
        self._queues.append(_queue_of(part, self.algorithm.advantages(part.rollout)))
        self._left.append(self._queues[-1])
        count = sum(map(len, self._left)) // self._size * self._size
        if count:
            left = Queue.concat(self._left)
            self._send(left.take(slice(count)))
            self._left = [left.take(slice(count, None))]

    def prepare(self, version: int, gathered: RolloutBatch, kept: Rollout, keep: Array) -> RolloutBatch:
        """Return what is trained on, moved to the learners: the columns `keep` (indices) of a step's rollout, which
        `kept` was cut to.

        Raises PluginError where filters kept other trajectories of the parts than of the whole step.
        """
        numbers = gathered.numbers[keep]
        before = np.isin(numbers, self.judged)
        known = [number for part in self._parts for number in part.numbers.tolist()]
        if numbers[before].tolist() != known:
            raise self._wrong("`select` keeps other trajectories of the whole step than of parts of it")
        rest = np.flatnonzero(~before)
        further = [self._prepared(version, gathered, take_columns(kept, rest), keep[rest])] if len(rest) else []
        chosen = joined([*self._parts, *further])
        return evolve(chosen, rollout=chosen.rollout.evolve(episodes=gathered.rollout.episodes))

    def _prepared(self, version: int, gathered: RolloutBatch, kept: Rollout, columns: Array) -> RolloutBatch:
        """Prepare columns of the step; samples are distributed to ranks by their position in the step."""
        known = sum(len(queue) for queue in self._queues)
        samples = find_samples(kept, columns, gathered)
        order, ranks = np.lexsort((samples.steps, samples.columns)), np.empty(len(samples.steps), np.int64)
        ranks[order] = (known + np.arange(len(order))) // self.spec.train.micro_batch % len(self.fleet.learners)
        return self.supply.prepare(version, gathered, kept, columns, ranks)

    def update(
        self, chosen: RolloutBatch, advantages: Advantages, wait: Callable[[Any], list[Any]]
    ) -> dict[str, float]:
        """Send the learners the samples that they do not have yet, and let them make the optimiser steps. Return
        metrics.

        Raises PluginError where parts got other scores than the whole step.
        """
        whole, epochs = _queue_of(chosen, advantages), self.spec.train.epochs
        known = sum(map(len, self._queues))
        if known:
            self._compare(Queue.concat(self._queues), whole)
        self._send(Queue.concat([*self._left, whole.take(slice(known, None))]))
        divisor, value_divisor = (max(float(_given(whole, name).sum()), 1e-8) for name in ("counts", "value_counts"))
        first = OptimizerStep(
            micro_batches=(), passes=0, divisor=divisor, value_divisor=value_divisor, accumulated=True
        )
        further = OptimizerStep(micro_batches=(), passes=0, divisor=divisor, value_divisor=value_divisor)
        steps = [first, *[further] * (epochs - 1)]
        workers = [self.fleet.worker_of(learner) for learner in self.fleet.learners]
        nothing = np.zeros(0, np.int64), np.zeros(0, np.int64)
        pending = [worker.call(HostInterface.update, chosen.rollout.step, nothing, {}, steps) for worker in workers]
        results = wait([*self._fed, *pending])[len(self._fed) :]
        return {
            "update/samples": float(len(whole)),
            "update/optimizer_steps": float(epochs),
            **merged(results),
            "time/learner": max(result["seconds"] for result in results),
        }

    def end(self, trained: bool) -> None:
        """Reset the state, as the step is over. Raises PluginError where `select` kept samples of parts and nothing of
        the whole step.
        """
        known = sum(map(len, self._queues))
        self.judged, self._parts, self._queues, self._left, self._fed = [], [], [], [], []
        self._begun = False
        if known and not trained:
            raise self._wrong(f"`select` keeps nothing of the whole step, and kept {known} samples of parts")

    # ------------------------------------------------------------------------------------------------------ inside

    def _send(self, queue: Queue) -> None:
        """Send samples to the learners, which run their passes as soon as they are free. Does not wait."""
        batches = round_robin(len(queue), len(self.fleet.learners), self.spec.train.micro_batch)
        passes, first, self._begun = max(map(len, batches)), not self._begun, True
        for learner, of_rank in zip(self.fleet.learners, batches, strict=True):
            own = queue.take(np.concatenate([np.zeros(0, np.int64), *of_rank]))
            ends = np.cumsum([len(batch) for batch in of_rank])[:-1]
            micro_batches = np.split(np.arange(len(own)), ends) if of_rank else []
            named, worker = (own.workers, own.places), self.fleet.worker_of(learner)
            self._fed.append(
                worker.call(HostInterface.forward_backward, named, own.light, micro_batches, passes, first)
            )

    def _compare(self, parts: Queue, whole: Queue) -> None:
        """Raises PluginError unless the parts are the first samples of the whole step, with the same scores."""
        count = len(parts)
        same = count <= len(whole) and all(
            np.array_equal(getattr(parts, name), getattr(whole, name)[:count]) for name in ("numbers", "steps")
        )
        if not same:
            raise self._wrong("`select` keeps other trajectories of the whole step than of parts of it")
        for name in (*(known.name for known in ADVANTAGES if known.in_batch), *self.algorithm.extras):
            before, now = parts.light[name], whole.light[name]
            if before is None and now is None:
                continue
            if before is None or now is None:
                raise self._wrong(f"there are {name} of the whole step or of its parts, and not of both")
            largest = float(np.abs(now).max(initial=0.0))
            off = float(np.abs(before - now[:count]).max(initial=0.0))
            if off > CLOSE * largest:
                raise self._wrong(f"{name} of parts differ by up to {off:.3g} from those of the whole step")

    def _wrong(self, what: str) -> PluginError:
        return PluginError(
            f"algorithm {self.spec.algorithm.type!r} says advantage_scope GROUP, and needs other groups: {what} (or a "
            f"wrapper around it does); the weights are unchanged. Set advantage_scope = AdvantageScope.STEP in it, or "
            f"asynchrony.streaming_update: false"
        )


def _queue_of(chosen: RolloutBatch, advantages: Advantages) -> Queue:
    samples = find_samples(chosen.rollout, np.arange(len(chosen.numbers)), chosen)
    queue = Queue(
        numbers=chosen.numbers[samples.columns],
        steps=samples.steps,
        workers=samples.workers,
        places=samples.places,
        light=light_arrays(chosen.rollout, advantages, samples),
    )
    return queue.take(np.lexsort((queue.steps, queue.numbers)))


def _given(queue: Queue, name: str) -> Array:
    array = queue.light[name]
    assert array is not None
    return array
