"""Route of samples from policies to learners, as the driver directs it: it decides what a step trains on, has model
inputs moved to the learners and scored there, and has everything freed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from attrs import evolve

from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Array, Requirements, Rollout
from vla_rl.runtime.comm.backend import Ref
from vla_rl.runtime.comm.handles import Fleet, by_reference
from vla_rl.runtime.comm.interfaces import HostInterface, LearnerInterface, PolicyInterface
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, RolloutSamples, all_samples, join_batches
from vla_rl.runtime.driver.samples.replay import ReplayBuffer, ReplayChanges, ReplayIndex
from vla_rl.runtime.messages.ids import SampleId
from vla_rl.runtime.messages.learning import ScoreRequest
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
        """Free what no later step trains on, after one that collected `batch`, and `trained` or not. Return metrics."""
        changes = self.replay.end_step(trained) if self.replay else ReplayChanges()
        over = ~np.isin(batch.numbers, changes.kept_tickets)
        freed = _joined_ids([batch.ids_by_worker(over), *(group.ids_by_worker() for group in changes.dropped)])
        learner_bytes = self.transfers.free_samples(batch.numbers.tolist(), freed)
        if self.replay is None:
            return {}
        return {"replay/groups": float(len(self.replay.batches)), "replay/mib": sum(learner_bytes) / 2**20}

    def _rescore_stale(self, batch: RolloutBatch, repeated: Array, version: int) -> Rollout:
        """Return the rollout with recomputed values and log-probs. New groups get what is needed where another version
        chose a chunk, replayed ones values if there is a critic."""
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
    """Moves a step's model inputs from the policies that made them to the learners, and knows which have arrived."""

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

        `ranks`: int64 [S], time-major samples' learner ranks; None: where possible in the workers that made them.
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
        """Free these samples (worker -> sample ids), forget these tickets. Return the bytes that each learner holds."""
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
        """Move samples of the policy of `worker` to a learner. `several_sources`: it also gets those of others."""
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


def rescore_rollout(
    fleet: Fleet, batch: RolloutBatch, *, values: Array, log_probs: Array, version: int, size: int | None
) -> Rollout:
    """Return the rollout with values and log-probs of the newest weights; `scoring.py` is the learners' half.

    Args:
        batch: the rollout batch, with `ranks`.
        values: bool [N], columns whose `values` and `next_values` are recomputed.
        log_probs: bool [N], columns whose `proximal_log_probs` are computed for chunks of other versions.
        version: version of the learners' weights.
        size: samples of a batch; None: those of one inference again, so that numbers equal the policy's own.
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
