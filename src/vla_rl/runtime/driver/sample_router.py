"""Route of samples from policies to learners, as the driver directs it: it has model inputs moved, keeps the trajectory
records of replayed groups, and has everything freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve

from vla_rl.core.run.selection import take_columns
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Array, Requirements, Rollout
from vla_rl.runtime.comm.backend import Ref
from vla_rl.runtime.comm.handles import Fleet, by_reference
from vla_rl.runtime.comm.interfaces import HostInterface, LearnerInterface, PolicyInterface
from vla_rl.runtime.driver.assembler import RolloutBatch, find_samples, joined
from vla_rl.runtime.driver.refresh import refreshed
from vla_rl.runtime.driver.replay import ReplayIndex
from vla_rl.runtime.messages.reports import TrajectoryResult
from vla_rl.runtime.placement.assignments import ranks_of


class SampleRouter:
    """Samples of the running step and of the replay buffer, and the learners that hold them."""

    def __init__(self, fleet: Fleet, spec: Spec, needs: Requirements):
        """Create the router. `needs`: requirements of the algorithm."""
        shape = RunShape.of(spec)
        self.fleet, self.needs, self.again = fleet, needs, shape.replays
        self.policy_at = {policy.worker: policy for policy in fleet.policies}
        self.early = shape.overlaps and len(fleet.learners) == 1
        """True where model inputs move as soon as their tickets are finished. With several learners the rank of a
        sample is known only when the step is complete, since all ranks get equally many.
        """
        self.replay = ReplayIndex(spec.asynchrony.replay, shape.replayed_groups, spec.seed)
        self.held: dict[int, RolloutBatch] = {}
        """Group -> its columns, for groups that may be used again."""
        self.size = spec.train.micro_batch if self.again or max(lane.num_envs for lane in fleet.lanes) == 1 else None
        """Batch size for `refreshed`."""
        self.metrics: dict[str, float] = {}
        """Metrics of what was prepared last."""
        self._new: dict[int, int] = {}
        """New groups of the running step -> version of the weights that chose the oldest chunk."""
        self._repeated: list[int] = []
        """Groups that the step uses again."""
        self._leaving: list[int] = []
        self._played: dict[int, list[TrajectoryResult]] = {}
        """Policy worker -> finished tickets since model inputs moved last."""
        self._sent: set[int] = set()
        """Tickets whose model inputs are on the learner, or on their way."""
        self._coming: list[Ref[None]] = []

    def send(self, worker: int, played: Sequence[TrajectoryResult]) -> None:
        """Move the model inputs of these finished tickets from the policy's worker to the learner, in portions of as
        many tickets as the worker has envs, since each move costs it time.
        """
        waiting = self._played.setdefault(worker, [])
        waiting.extend(played)
        if len(waiting) >= self.policy_at[worker].assignment.envs_served:
            self._send(worker)

    def prepare(
        self, version: int, gathered: RolloutBatch, kept: Rollout, keep: Array, ranks: Array | None = None
    ) -> RolloutBatch:
        """Prepare what is trained on, and move it to the learners: replayed groups first, then the columns `keep`
        (indices) of a step's rollout, which `kept` was cut to.

        `ranks`: int64 [S], learner rank of each sample in time-major order; None: chosen so that samples stay in the
        worker that made them where possible.
        """
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
        """Free what no later step trains on, after a step that took `gathered` from the rollouts. `trained`: False
        where the step had nothing to train on. Return metrics.
        """
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
        """Move the model inputs of the tickets that wait for this worker."""
        played = self._played.pop(worker)
        numbers = [ticket.finished.number for ticket in played]
        self._move(0, worker, np.concatenate([ticket.chosen["sample"] for ticket in played]))
        self._sent.update(numbers)
        self._coming.append(self.policy_at[worker].call(PolicyInterface.release, numbers))

    def _hold(self, own: RolloutBatch, version: int) -> None:
        """Keep the trajectory records of a step's new groups for replay."""
        rollout = own.rollout
        oldest = rollout.versions.masked_fill(~rollout.samples, version).amin(0)
        for group in rollout.groups.unique().tolist():
            columns = (rollout.groups == group).nonzero().flatten().numpy()
            self._new[group] = int(oldest[columns].min())
            self.held[group] = own.cut(take_columns(rollout, columns).evolve(episodes=()), columns)

    def _moved(self, own: RolloutBatch, ranks: Array | None) -> RolloutBatch:
        """Move all samples to their learners. Return the batch with the rank of each sample."""
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
        """Move samples that the policy of `worker` made to a learner. `mixed`: the learner holds samples of other
        policies too.
        """
        learner, places = self.fleet.worker_of(self.fleet.learners[rank]), np.sort(places)
        if learner.worker == worker:
            self._coming.append(learner.call(HostInterface.share_samples, places, mixed or self.again))
            return
        part = by_reference(self.policy_at[worker].call(PolicyInterface.take, places))
        copied = self.early or self.again
        self._coming.append(self.fleet.learners[rank].call(LearnerInterface.receive, worker, part, copied))

    def _wait(self) -> None:
        coming, self._coming = self._coming, []
        self.fleet.get_all(coming)

    def _refreshed(self, whole: RolloutBatch, again: Array, version: int) -> Rollout:
        """Return the rollout with recomputed values and log-probs.

        New groups get what the algorithm needs, if another version chose a chunk. Replayed groups get values wherever
        there is a critic.
        """
        rollout, needs = whole.rollout, self.needs
        first = (rollout.samples & (rollout.versions != version)).numpy()[:, ~again].any()
        values = np.where(again, needs.values, first and needs.recomputed_values)
        log_probs = np.full(len(again), needs.proximal_log_probs)
        if log_probs.any():
            whole = evolve(whole, rollout=rollout.evolve(proximal_log_probs=rollout.log_probs))
        return refreshed(self.fleet, whole, values=values, log_probs=log_probs, version=version, size=self.size)

    def _metrics(self, rollout: Rollout, again: Array, version: int) -> dict[str, float]:
        if not self.again:
            return {}
        samples = rollout.samples.numpy()
        ages = (version - rollout.versions.numpy())[:, again][samples[:, again]]
        of_ages = {"replay/lag_mean": float(ages.mean()), "replay/lag_max": float(ages.max())} if len(ages) else {}
        return {"replay/share": len(ages) / float(samples.sum()), **of_ages}
