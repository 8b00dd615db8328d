"""Assignments of a plan's workers: lanes, policies and learner ranks of each slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.plan import Batching, Plan, Slot
from vla_rl.core.types import Array


def assign_workers(plan: Plan, num_envs: int, one_process: bool, adds_envs: bool = False) -> list[Assignment]:
    """Return the lanes and ranks of every slot. `one_process` puts all of the plan's lanes into a single worker.
    `adds_envs`: policies also act in envs that are not simulators, such as those of a world model, in the first worker
    with simulators."""
    sims, policies, learners = (plan.hosting(role) for role in ("sim", "policy", "learner"))
    count = len(sims) * plan.stages
    if num_envs % count:
        raise UserError(
            f"{num_envs} envs cannot be shared evenly by {count} lanes ({len(sims)} sim slots x {plan.stages})"
        )
    envs_per_lane = num_envs // count
    lanes = [LaneSlice(index=i, first_env=i * envs_per_lane, num_envs=envs_per_lane) for i in range(count)]
    if one_process:
        slot = Slot(
            roles=("sim", "policy", "learner") if learners else ("sim", "policy"),
            device=plan.slots[policies[0]].device,
            cpus=sum(s.cpus for s in plan.slots),
        )
        batching = Batching(max_batch=_window_envs(plan, lanes, len(policies)))
        return [
            Assignment(
                index=0,
                slot=slot,
                lanes=tuple(lanes),
                served=tuple(lanes),
                homes=(0,) * len(lanes),
                batching=batching,
                rank=0 if learners else -1,
                world=1 if learners else 0,
                offload=plan.offload,
                added_envs_at=0 if adds_envs else None,
            )
        ]
    spread = len(sims) >= len(policies)  # then each policy serves whole sim workers; otherwise single lanes
    of_sim = {slot: tuple(lanes[i * plan.stages : (i + 1) * plan.stages]) for i, slot in enumerate(sims)}
    slot_of_lane = {lane.index: slot for slot, sim_lanes in of_sim.items() for lane in sim_lanes}
    served: dict[int, list[LaneSlice]] = {policy: [] for policy in policies}
    for i, sim in enumerate(sims):
        for lane in of_sim[sim]:
            acting = sim if sim in served else policies[(i if spread else lane.index) % len(policies)]
            served[acting].append(lane)
    rank = {learner: i for i, learner in enumerate(learners)}
    batching = Batching(max_batch=_window_envs(plan, lanes, len(policies)), max_wait_s=plan.batching.max_wait_s)
    return [
        Assignment(
            index=i,
            slot=slot,
            lanes=of_sim.get(i, ()),
            served=tuple(served.get(i, ())),
            homes=tuple(slot_of_lane[lane.index] for lane in served.get(i, ())),
            batching=batching,
            rank=rank.get(i, -1),
            world=len(learners),
            offload=plan.offload,
            concurrent_lanes=plan.concurrent_lanes,
            added_envs_at=sims[0] if adds_envs else None,
        )
        for i, slot in enumerate(plan.slots)
    ]


def ranks_of(maker: Array, rank_of: Mapping[int, int]) -> Array:
    """Return the learner rank that trains on each sample, int64 [S].

    Where every rank's own policy made some samples, all of them stay. Else each rank gets equally many, its own first.

    Args:
        maker: int64 [S], worker whose policy made the sample.
        rank_of: worker -> rank.
    """
    world = len(rank_of)
    made_by = np.array([rank_of.get(worker, -1) for worker in maker.tolist()], np.int64)
    if set(made_by.tolist()) == set(range(world)):
        return made_by
    ranks = np.full(len(maker), -1, np.int64)
    left = np.array([(len(maker) + world - 1 - rank) // world for rank in range(world)])
    for rank in range(world):
        own_samples = np.flatnonzero(made_by == rank)[: left[rank]]
        ranks[own_samples] = rank
        left[rank] -= len(own_samples)
    ranks[ranks < 0] = np.repeat(np.arange(world), left)
    return ranks


def _window_envs(plan: Plan, lanes: Sequence[LaneSlice], policies: int) -> int | None:
    """Return the envs of one inference: the plan's; with synchronous stages one lane's, to overlap; else all."""
    if plan.batching.max_batch is not None:
        return plan.batching.max_batch
    overlapping = plan.stages > 1 and plan.batching.max_wait_s is None and not plan.concurrent_lanes
    return lanes[0].num_envs if overlapping else sum(lane.num_envs for lane in lanes) // policies


@frozen(kw_only=True)
class Assignment:
    """Place of a worker in the plan."""

    index: int
    slot: Slot
    lanes: tuple[LaneSlice, ...]
    """Lanes of its sim role."""
    served: tuple[LaneSlice, ...]
    """Lanes that its policy role acts for."""
    homes: tuple[int, ...]
    """Workers that host the simulators of these lanes."""
    batching: Batching
    rank: int
    world: int
    """Learner rank (-1: no learner) and number of ranks."""
    offload: frozenset[str] = frozenset()
    """Roles that leave the device between phases."""
    concurrent_lanes: bool = False
    """True where the lanes of a sim worker, this one or another, step concurrently."""
    added_envs_at: int | None = None
    """Worker of the envs that a part of the training step adds; None: none are added."""

    @property
    def is_local(self) -> bool:
        """True where simulators and policy are in this worker and call each other directly."""
        return bool(self.served) and self.served == self.lanes

    @property
    def envs_served(self) -> int:
        """Number of envs that its policy role acts for."""
        return sum(lane.num_envs for lane in self.served)

    @property
    def lane_threads(self) -> int:
        """Number of threads in which its lanes run concurrently; 0: one lane after another."""
        return len(self.lanes) if self.concurrent_lanes else 0

    @property
    def sim_workers(self) -> list[int]:
        """Other workers whose simulators its policy role acts for."""
        return sorted(set(self.homes) - {self.index})

    @property
    def peer_workers(self) -> list[int]:
        """Other workers that its policy role calls."""
        added = () if self.added_envs_at is None or not self.served else (self.added_envs_at,)
        return sorted({*self.homes, *added} - {self.index})


@frozen(kw_only=True)
class LaneSlice:
    """The envs first_env .. first_env + num_envs - 1 of the run."""

    index: int
    first_env: int
    num_envs: int
