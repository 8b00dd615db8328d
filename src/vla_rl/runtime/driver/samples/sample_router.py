"""Route of samples from policies to learners, as the driver directs it: it decides what a step trains on, has model
inputs moved to the learners and scored there, and has everything freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve

from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import Array, Requirements, Rollout
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch, join_batches
from vla_rl.runtime.driver.samples.replay import NoReplay, Replay, ReplayBuffer, ReplayIndex
from vla_rl.runtime.driver.samples.rescoring import rescore_rollout
from vla_rl.runtime.driver.samples.sample_transfers import SampleTransfers


class SampleRouter:
    """Samples of the running step and of the replay buffer, on their way to the learners that train on them."""

    def __init__(self, fleet: Fleet, spec: Spec, needs: Requirements):
        """Create the router. `needs`: requirements of the algorithm."""
        shape = RunShape.from_spec(spec)
        self.fleet = fleet
        self.needs = needs
        self.transfers = SampleTransfers(fleet, runs_ahead=shape.has_overlap, replays=shape.has_replay)
        self.replay: Replay = NoReplay()
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
        prepared = join_batches([*self.replay.draw_groups(version, new), new])
        repeated = np.arange(len(prepared.numbers)) < len(prepared.numbers) - len(new.numbers)
        self.metrics = self.replay.batch_metrics(prepared.rollout, repeated, version)
        return evolve(prepared, rollout=self._rescore_stale(prepared, repeated, version))

    def free_unused(self, batch: RolloutBatch, trained: bool) -> dict[str, float]:
        """Free what no later step trains on, after a step that collected `batch`. `trained`: False where the step had
        nothing to train on. Return metrics.
        """
        changes = self.replay.end_step(trained)
        over = ~np.isin(batch.numbers, changes.kept_tickets)
        freed = _joined_ids([batch.ids_by_worker(over), *(group.ids_by_worker() for group in changes.dropped)])
        return self.replay.buffer_metrics(self.transfers.free_samples(batch.numbers.tolist(), freed))

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


def _joined_ids(parts: Sequence[dict[int, Array]]) -> dict[int, Array]:
    """Return the sample ids of all parts: worker -> int64."""
    workers = set[int]().union(*parts)
    return {worker: np.concatenate([part[worker] for part in parts if worker in part]) for worker in workers}
