"""Route of samples from policies to learners, as the driver directs it: it decides what a step trains on, has model
inputs moved to the learners and scored there, and has everything freed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve

from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Array, Requirements, Rollout
from vla_rl.runtime.comm.backend import Ref
from vla_rl.runtime.comm.handles import Fleet, by_reference
from vla_rl.runtime.comm.interfaces import HostInterface, LearnerInterface, PolicyInterface
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, all_samples, join_batches
from vla_rl.runtime.driver.samples.replay import ReplayBuffer, ReplayChanges, ReplayIndex
from vla_rl.runtime.driver.samples.rescoring import rescore_rollout
from vla_rl.runtime.messages.reports import TrajectoryResult
from vla_rl.runtime.placement.assignments import ranks_of


class SampleRouter:
    """Samples of the running step and of the replay buffer, on their way to the learners that train on them."""

    def __init__(self, fleet: Fleet, spec: Spec, needs: Requirements):
        """Create the router. `needs`: requirements of the algorithm."""
        shape = RunShape.from_spec(spec)
        self.fleet = fleet
        self.needs = needs
        self.transfers = SampleTransfers(fleet, runs_ahead=shape.has_overlap, replays=shape.has_replay)
        self.replay: ReplayBuffer | None = None
        section = spec.asynchrony.replay
        if section is not None:
            self.replay = ReplayBuffer(ReplayIndex(section, shape.replayed_groups, spec.seed))
        single_env_lanes = max(lane.num_envs for lane in fleet.lanes) == 1
        self.score_batch = spec.train.micro_batch if shape.has_replay or single_env_lanes else None
        """Batch size for `rescore_rollout`."""
        self.metrics: dict[str, float] = {}
        """Metrics of what was prepared last."""

    def prepare_samples(
        self, batch: RolloutBatch, selected: Rollout, columns: Array, ranks: Array | None = None
    ) -> RolloutBatch:
        """Prepare what is trained on, and move it to the learners: replayed groups first, then the columns (indices) of
        a step's rollout that `selected` consists of.

        `ranks`: learner rank of each sample, as `SampleTransfers.move_samples`.
        """
        version = self.fleet.version
        new = self.transfers.move_samples(batch.cut_columns(selected, columns), ranks)
        prepared = join_batches([*(self.replay.draw_groups(version, new) if self.replay else ()), new])
        repeated = np.arange(len(prepared.numbers)) < len(prepared.numbers) - len(new.numbers)
        self.metrics = self.replay.batch_metrics(prepared.rollout, repeated, version) if self.replay else {}
        return evolve(prepared, rollout=self._rescore_stale(prepared, repeated, version))

    def free_unused(self, batch: RolloutBatch, trained: bool) -> dict[str, float]:
        """Free what no later step trains on, after a step that collected `batch`. `trained`: False where the step had
        nothing to train on. Return metrics."""
        changes = self.replay.end_step(trained) if self.replay else ReplayChanges()
        over = ~np.isin(batch.numbers, changes.kept_tickets)
        freed = _joined_ids([batch.ids_by_worker(over), *(group.ids_by_worker() for group in changes.dropped)])
        learner_bytes = self.transfers.free_samples(batch.numbers.tolist(), freed)
        return self.replay.buffer_metrics(learner_bytes) if self.replay else {}

    def _rescore_stale(self, batch: RolloutBatch, repeated: Array, version: int) -> Rollout:
        """Return the rollout with recomputed values and log-probs.

        New groups get what the algorithm needs, if another version chose a chunk. Replayed groups get values wherever
        there is a critic.
        """
        rollout = batch.rollout
        needs = self.needs
        stale = (rollout.samples & (rollout.versions != version)).numpy()[:, ~repeated].any()
        values = np.where(repeated, needs.values, stale and needs.recomputed_values)
        log_probs = np.full(len(repeated), needs.proximal_log_probs)
        if log_probs.any():
            batch = evolve(batch, rollout=rollout.evolve(proximal_log_probs=rollout.log_probs))
        return rescore_rollout(
            self.fleet, batch, values=values, log_probs=log_probs, version=version, size=self.score_batch
        )


class SampleTransfers:
    """Moves the model inputs of a step's samples from the policies that made them to the learners, and knows which are
    already there."""

    def __init__(self, fleet: Fleet, *, runs_ahead: bool, replays: bool) -> None:
        """Create the transfers.

        Args:
            runs_ahead: rollouts run ahead of training.
            replays: learners keep samples for later steps.
        """
        self.fleet = fleet
        self.replays = replays
        self.prefetches = runs_ahead and len(fleet.learners) == 1
        """True where model inputs move as soon as their tickets are collected. With several learners the rank of a
        sample is known only when the step is complete, since all ranks get equally many."""
        self.policy_of_worker = {policy.worker_index: policy for policy in fleet.policies}
        self._unsent: dict[int, dict[int, Array]] = {}
        """Policy worker -> tickets collected since its model inputs moved last, with their sample ids."""
        self._sent: set[int] = set()
        """Tickets whose model inputs are on the learner, or on their way."""
        self._pending: list[Ref[None]] = []

    def prefetch_inputs(self, worker: int, trajectories: Sequence[TrajectoryResult]) -> None:
        """Move the model inputs of these collected tickets from the policy's worker to the learner, in portions of as
        many tickets as the worker has envs, since each move costs it time."""
        unsent = self._unsent.setdefault(worker, {})
        unsent |= {trajectory.env_part.number: trajectory.policy_part["sample_ids"] for trajectory in trajectories}
        if len(unsent) >= self.policy_of_worker[worker].assignment.envs_served:
            self._move_unsent_inputs(worker)

    def move_samples(self, batch: RolloutBatch, ranks: Array | None) -> RolloutBatch:
        """Move all samples to their learners, and wait for it. Return the batch with the rank of each sample.

        `ranks`: int64 [S], learner rank of each sample in time-major order; None: chosen so that samples stay in the
        worker that made them where possible.
        """
        for worker in list(self._unsent):
            self._move_unsent_inputs(worker)
        samples = all_samples(batch)
        rank_of_worker = {learner.worker_index: rank for rank, learner in enumerate(self.fleet.learners)}
        if ranks is None:
            ranks = ranks_of(samples.workers, rank_of_worker)
        unsent = ~np.isin(samples.numbers, list(self._sent))
        for rank in rank_of_worker.values():
            to_rank = unsent & (ranks == rank)
            sources = np.unique(samples.workers[to_rank]).tolist()
            for worker in sources:
                sample_ids = samples.sample_ids[to_rank & (samples.workers == worker)]
                self._move_to_learner(rank, worker, sample_ids, several_sources=len(sources) > 1)
        self.wait_for_transfers()
        rank_of_sample = np.zeros(batch.sample_ids.shape, np.int64)
        rank_of_sample[samples.steps, samples.columns] = ranks
        return evolve(batch, ranks=rank_of_sample)

    def wait_for_transfers(self) -> None:
        """Wait until all transfers have arrived."""
        pending = self._pending
        self._pending = []
        self.fleet.get_all(pending)

    def free_samples(self, tickets: Sequence[int], sample_ids: Mapping[int, Array]) -> list[int]:
        """Let the learners free these samples (worker -> sample ids), and forget these tickets. Return the bytes that
        each learner still holds."""
        self.wait_for_transfers()
        self._sent.difference_update(tickets)
        for unsent in self._unsent.values():  # a step that trained on nothing has moved nothing
            for ticket in tickets:
                unsent.pop(ticket, None)
        return self.fleet.get_all(
            [learner.call(LearnerInterface.release_samples, sample_ids) for learner in self.fleet.learners]
        )

    def _move_unsent_inputs(self, worker: int) -> None:
        """Move the model inputs of the unsent tickets of this worker."""
        unsent = self._unsent.pop(worker)
        if unsent:
            self._move_to_learner(
                0, worker, np.concatenate(list(unsent.values()))
            )  # inputs are prefetched to one learner only
            self._sent.update(unsent)
            self._pending.append(self.policy_of_worker[worker].call(PolicyInterface.release_tickets, list(unsent)))

    def _move_to_learner(self, rank: int, worker: int, sample_ids: Array, several_sources: bool = False) -> None:
        """Move samples that the policy of `worker` made to a learner. `several_sources`: the learner holds samples of
        other policies too."""
        learner = self.fleet.learners[rank]
        sample_ids = np.sort(sample_ids)
        if learner.worker_index == worker:
            host = several_sources or self.replays
            self._pending.append(self.fleet.worker_of(learner).call(HostInterface.share_samples, sample_ids, host))
            return
        samples = by_reference(self.policy_of_worker[worker].call(PolicyInterface.take_samples, sample_ids))
        copied = self.prefetches or self.replays
        self._pending.append(learner.call(LearnerInterface.receive, worker, samples, copied))


def _joined_ids(parts: Sequence[dict[int, Array]]) -> dict[int, Array]:
    """Return the sample ids of all parts: worker -> int64."""
    workers = set[int]().union(*parts)
    return {worker: np.concatenate([part[worker] for part in parts if worker in part]) for worker in workers}
