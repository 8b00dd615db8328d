"""What learners train on, as the driver sees it: it has heavy parts moved to them, keeps the light part of what is
trained on again, and has all of it freed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve

from vla_rl.core.run.selection import take_columns
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Array, Rollout
from vla_rl.runtime.comm.backend import Ref
from vla_rl.runtime.comm.handles import Fleet, by_reference
from vla_rl.runtime.comm.interfaces import HostInterface, LearnerInterface, PolicyInterface
from vla_rl.runtime.driver.assembler import RolloutBatch, find_samples, joined
from vla_rl.runtime.driver.refresh import refreshed
from vla_rl.runtime.driver.replay import ReplayIndex
from vla_rl.runtime.messages.reports import TrajectoryResult
from vla_rl.runtime.placement.assignments import ranks_of


class SampleRouter:
    def __init__(self, fleet: Fleet, spec: Spec, needs: frozenset[str]):
        """`needs`: of the algorithm."""
        shape = RunShape.of(spec)
        self.fleet, self.needs, self.again = fleet, needs, shape.replays
        self.policy_at = {policy.worker: policy for policy in fleet.policies}
        self.early = shape.overlaps and len(fleet.learners) == 1
        """Heavy parts move as soon as their tickets are played. Which of several learners will train on a sample shows
        when the step is whole: each gets equally many."""
        self.replay = ReplayIndex(spec.asynchrony.replay, shape.replayed_groups, spec.seed)
        self.held: dict[int, RolloutBatch] = {}
        """Group -> its columns, of those that may be trained on again."""
        self.size = spec.train.micro_batch if self.again or max(lane.rows for lane in fleet.lanes) == 1 else None
        """As of `refreshed`."""
        self.metrics: dict[str, float] = {}
        """Of what was prepared last."""
        self._new: dict[int, int] = {}
        """Groups that the running step trains on first -> version of the oldest chunk."""
        self._repeated: list[int] = []
        """Those that it trains on again."""
        self._leaving: list[int] = []
        self._played: dict[int, list[TrajectoryResult]] = {}
        """Policy's worker -> what it played since heavy parts moved last."""
        self._sent: set[int] = set()
        """Tickets whose heavy parts are with the learner, or on their way."""
        self._coming: list[Ref[None]] = []

    def send(self, worker: int, played: Sequence[TrajectoryResult]) -> None:
        """Move the heavy parts of these tickets, which the policy of that worker has played, to the learner; as many
        at once as it has rows, since each move costs it time."""
        waiting = self._played.setdefault(worker, [])
        waiting.extend(played)
        if len(waiting) >= self.policy_at[worker].assignment.rows_served:
            self._send(worker)

    def prepare(
        self, version: int, gathered: RolloutBatch, kept: Rollout, keep: Array, ranks: Array | None = None
    ) -> RolloutBatch:
        """What is trained on, which lies with the learners then: of a step's rollout what `kept` is cut to (columns
        `keep`, indices), behind what is trained on again. `ranks`: int64 [S], the learner of each of its samples in
        time-major order; None: as suits those who made them."""
        whole = own = self._moved(gathered.cut(kept, keep), ranks)
        if self.again:
            self._leaving = self.replay.expire(version)
            self._repeated = self.replay.choose(kept.step, len(kept.groups.unique()))
            whole = joined([*(self.held[group] for group in self._repeated), own])
            self._hold(own, version)
        again = np.arange(len(whole.numbers)) < len(whole.numbers) - len(own.numbers)
        self.metrics = self._metrics(whole.rollout, again, version)
        return evolve(whole, rollout=self._refreshed(whole, again, version))

    def finish(self, gathered: RolloutBatch, trained: bool) -> dict[str, float]:
        """A step is over that took this from the rollouts, and was trained or had nothing to train on; what nobody
        will train on any more is freed. -> metrics."""
        leaving = [*self._leaving, *(self.replay.trained(self._repeated, self._new) if trained else ())]
        gone = [self.held.pop(group) for group in leaving if group in self.held]
        stay = [number for group in self._new if group in self.held for number in self.held[group].numbers]
        over = [gathered.places_of(~np.isin(gathered.numbers, stay)), *(group.places_of() for group in gone)]
        places = {worker: np.concatenate([of[worker] for of in over if worker in of]) for worker in set().union(*over)}
        self._wait()
        self._sent.difference_update(gathered.numbers.tolist())
        self._new, self._repeated, self._leaving = {}, [], []
        held = self.fleet.get_all([learner.call(LearnerInterface.release, places) for learner in self.fleet.learners])
        return {"replay/groups": float(len(self.held)), "replay/mib": sum(held) / 2**20} if self.again else {}

    # ------------------------------------------------------------------------------------------------------ inside

    def _send(self, worker: int) -> None:
        """Move what waits there."""
        played = self._played.pop(worker)
        numbers = [ticket.finished.number for ticket in played]
        self._move(0, worker, np.concatenate([ticket.chosen["sample"] for ticket in played]))
        self._sent.update(numbers)
        self._coming.append(self.policy_at[worker].call(PolicyInterface.release, numbers))

    def _hold(self, own: RolloutBatch, version: int) -> None:
        """Keep the light part of a step's own groups."""
        rollout = own.rollout
        oldest = rollout.versions.masked_fill(~rollout.samples, version).amin(0)
        for group in rollout.groups.unique().tolist():
            columns = (rollout.groups == group).nonzero().flatten().numpy()
            self._new[group] = int(oldest[columns].min())
            self.held[group] = own.cut(take_columns(rollout, columns).evolve(episodes=()), columns)

    def _moved(self, own: RolloutBatch, ranks: Array | None) -> RolloutBatch:
        """With the learner of each sample; the samples lie there then."""
        for worker in list(self._played):
            self._send(worker)
        samples = find_samples(own.rollout, np.arange(len(own.numbers)), own)
        rank_of = {learner.worker: rank for rank, learner in enumerate(self.fleet.learners)}
        ranks = ranks_of(samples.workers, rank_of) if ranks is None else ranks
        left = ~np.isin(own.numbers[samples.columns], list(self._sent))
        for rank in rank_of.values():
            mine = left & (ranks == rank)
            makers = np.unique(samples.workers[mine]).tolist()
            for worker in makers:
                places = samples.places[mine & (samples.workers == worker)]
                self._move(rank, worker, places, mixed=len(makers) > 1)
        self._wait()
        at = np.zeros(own.places.shape, np.int64)
        at[samples.steps, samples.columns] = ranks
        return evolve(own, ranks=at)

    def _move(self, rank: int, worker: int, places: Array, mixed: bool = False) -> None:
        """Have samples that the policy of `worker` made lie with a learner; `mixed`: beside those of others."""
        learner, places = self.fleet.worker_of(self.fleet.learners[rank]), np.sort(places)
        if learner.worker == worker:
            self._coming.append(learner.call(HostInterface.keep, places, mixed or self.again))
            return
        part = by_reference(self.policy_at[worker].call(PolicyInterface.take, places))
        copied = self.early or self.again
        self._coming.append(self.fleet.learners[rank].call(LearnerInterface.receive, worker, part, copied))

    def _wait(self) -> None:
        coming, self._coming = self._coming, []
        self.fleet.get_all(coming)

    def _refreshed(self, whole: RolloutBatch, again: Array, version: int) -> Rollout:
        """With values and log-probs of the newest weights: of first uses as the algorithm needs them, if another
        version chose a chunk; of what is trained on again wherever there is a critic."""
        rollout, needs = whole.rollout, self.needs
        first = (rollout.samples & (rollout.versions != version)).numpy()[:, ~again].any()
        values = np.where(again, "values" in needs, first and "fresh-values" in needs)
        log_probs = np.full(len(again), "fresh-log-probs" in needs)
        if log_probs.any():
            whole = evolve(whole, rollout=rollout.evolve(fresh_log_probs=rollout.log_probs))
        return refreshed(self.fleet, whole, values=values, log_probs=log_probs, version=version, size=self.size)

    def _metrics(self, rollout: Rollout, again: Array, version: int) -> dict[str, float]:
        if not self.again:
            return {}
        samples = rollout.samples.numpy()
        ages = (version - rollout.versions.numpy())[:, again][samples[:, again]]
        of_ages = {"replay/age_mean": float(ages.mean()), "replay/age_max": float(ages.max())} if len(ages) else {}
        return {"replay/share": len(ages) / float(samples.sum()), **of_ages}
