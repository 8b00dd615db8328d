"""Reduction of a job to the part that has to be simulated. Of workers that do the same only some are simulated: one of
each kind where nothing is drawn, else more."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from vla_rl.core.plan import Plan
from vla_rl.runtime.placement.assignments import Assignment, LaneSlice
from vla_rl.runtime.planning.profile import Profile
from vla_rl.runtime.scheduling.batching import Lane, inference_groups

LANES = 32
"""Minimum number of simulated lanes, or all lanes if there are fewer."""
ENVS = 256
"""Number of envs up to which each is simulated, where envs take several tickets and a worker has several lanes."""
NO_SIMULATOR: Any = None
"""Simulator of lanes that are only grouped."""
KINDS = 4
"""Minimum number of simulated teams, where nothing varies but teams differ."""


@define(eq=False)
class Server:
    """Resource that does one thing at a time: a worker, or a device that several workers share."""

    free: float = 0.0


@frozen(kw_only=True)
class JobModel:
    """The simulated part of a job."""

    workers: Mapping[int, Assignment]
    """Workers with simulators and policies, by index."""
    learners: tuple[Assignment, ...]
    """All learners of the job."""
    servers: Mapping[int, Server]
    """Worker -> its server."""
    tickets: int
    """Tickets of a training step, for these workers."""
    publishes: bool
    """True where some policies are in other workers than the learners."""
    moving: float
    """Seconds in which a step's roles leave their devices and come back."""
    widths: Mapping[int, int] = field(factory=dict)
    """Lane -> number of sim workers that it stands for, which do the same at once; 1 where it is left out."""
    fold: int = 1
    """Number of envs, and of tickets, that one simulated env or ticket stands for."""

    @property
    def policy_workers(self) -> list[Assignment]:
        return [worker for worker in self.workers.values() if worker.served]

    def worker_count(self, role: str) -> int:
        """Return the number of a role's workers."""
        if role == "sim":
            lanes = [[self.widths.get(lane.index, 1) for lane in worker.lanes] for worker in self.workers.values()]
            return sum(max(widths) for widths in lanes if widths)
        return len(self.policy_workers if role == "policy" else self.learners)


def reduce_job(
    plan: Plan, assignments: Sequence[Assignment], profile: Profile, tickets: int, moving: float
) -> JobModel:
    """Return the part of a plan to simulate. `tickets`: tickets of a training step; `moving`: as in `JobModel`."""
    servers = _make_servers(assignments)
    policies = [assignment for assignment in assignments if assignment.served]
    envs = sum(lane.num_envs for assignment in assignments for lane in assignment.lanes)
    simulated = _typical_workers(_group_teams(assignments, servers), servers, profile.has_variation)
    simulated_envs = sum(lane.num_envs for worker in simulated for lane in worker.lanes)
    widths = dict[int, int]()
    fold = 1
    exact = tickets == envs or all(len(policy.served) == 1 for policy in policies)
    if not profile.has_variation and tickets % envs == 0 and (exact or simulated_envs > ENVS):
        simulated, widths = _in_step(simulated, servers)
        simulated, fold = _fold_envs(simulated)
    return JobModel(
        workers={worker.index: worker for worker in simulated},
        learners=tuple(assignment for assignment in assignments if assignment.rank >= 0),
        servers=servers,
        tickets=math.ceil(tickets * simulated_envs / envs / fold),
        publishes=any(assignment.rank < 0 for assignment in policies),
        moving=moving,
        widths=widths,
        fold=fold,
    )


def _make_servers(assignments: Sequence[Assignment]) -> dict[int, Server]:
    """Return a server for each worker; workers on one GPU share a server."""
    shared: dict[Hashable, Server] = {}
    servers = {}
    for assignment in assignments:
        on_gpu = assignment.slot.gpus > 0 and assignment.slot.index is not None
        key: Hashable = (assignment.slot.node, assignment.slot.index) if on_gpu else assignment.index
        servers[assignment.index] = shared.setdefault(key, Server())
    return servers


def _group_teams(assignments: Sequence[Assignment], servers: Mapping[int, Server]) -> list[list[Assignment]]:
    """Group the workers with simulators and policies: workers that call each other or share a device form a team."""
    team = {assignment.index: assignment.index for assignment in assignments}

    def team_of(worker: int) -> int:
        while team[worker] != worker:
            team[worker] = worker = team[team[worker]]
        return worker

    first_of_server: dict[int, int] = {}
    for assignment in assignments:
        if assignment.lanes or assignment.served:
            for other in (
                *assignment.homes,
                first_of_server.setdefault(id(servers[assignment.index]), assignment.index),
            ):
                team[team_of(other)] = team_of(assignment.index)
    teams: dict[int, list[Assignment]] = {}
    for assignment in assignments:
        if assignment.lanes or assignment.served:
            teams.setdefault(team_of(assignment.index), []).append(assignment)
    return list(teams.values())


def _typical_workers(
    teams: Sequence[Sequence[Assignment]], servers: Mapping[int, Server], varies: bool
) -> list[Assignment]:
    """Return the workers of some teams of each kind, so that the shares of the kinds stay about the same."""
    kinds: dict[Hashable, list[Sequence[Assignment]]] = {}
    for team in teams:
        kinds.setdefault(_team_kind(team, servers), []).append(team)
    lanes = sum(len(worker.lanes) for team in teams for worker in team) / len(teams)
    most = math.ceil(LANES / lanes) if varies else 1 if len(kinds) == 1 else KINDS
    share = min(1.0, most / len(teams))
    return [worker for kind in kinds.values() for team in kind[: math.ceil(len(kind) * share)] for worker in team]


def _team_kind(team: Sequence[Assignment], servers: Mapping[int, Server]) -> Hashable:
    """Return a key that is equal for teams that do the same."""
    position = {worker.index: i for i, worker in enumerate(team)}
    devices: dict[int, int] = {}

    def worker_properties(worker: Assignment) -> tuple[Any, ...]:
        device = devices.setdefault(id(servers[worker.index]), len(devices))
        lanes = (len(worker.lanes), len(worker.served), *{lane.num_envs for lane in (*worker.lanes, *worker.served)})
        return worker.slot.roles, worker.slot.cpus, device, lanes, tuple(position[host] for host in worker.homes)

    return tuple(worker_properties(worker) for worker in team)


def _in_step(workers: Sequence[Assignment], servers: Mapping[int, Server]) -> tuple[list[Assignment], dict[int, int]]:
    """Merge lanes of one inference, each with a sim worker that does nothing else, into one lane. Return (workers, lane
    -> number of its sim workers). Nothing may vary."""
    by_index = {worker.index: worker for worker in workers}
    uses: dict[int, int] = {}
    for worker in workers:
        uses[id(servers[worker.index])] = uses.get(id(servers[worker.index]), 0) + 1
    widths: dict[int, int] = {}
    for worker in workers:
        homes = [by_index[host] for host in worker.homes]
        alone = all(len(host.lanes) == 1 and not host.served and uses[id(servers[host.index])] == 1 for host in homes)
        if not worker.served or not alone or worker.concurrent_lanes or worker.batching.max_wait_s is not None:
            continue
        merged_lanes = list[LaneSlice]()
        merged_homes = list[int]()
        host_of_lane = {lane.index: host for lane, host in zip(worker.served, homes, strict=True)}
        for group in inference_groups([Lane(slice=lane, sim=NO_SIMULATOR) for lane in worker.served], worker.batching):
            first = evolve(group[0].slice, num_envs=sum(lane.slice.num_envs for lane in group))
            host = host_of_lane[first.index]
            widths[first.index] = len(group)
            for lane in group:
                by_index.pop(host_of_lane[lane.slice.index].index, None)
            by_index[host.index] = evolve(host, lanes=(first,))
            merged_lanes.append(first)
            merged_homes.append(host.index)
        by_index[worker.index] = evolve(worker, served=tuple(merged_lanes), homes=tuple(merged_homes))
    return list(by_index.values()), widths


def _fold_envs(workers: Sequence[Assignment]) -> tuple[list[Assignment], int]:
    """Reduce the envs of all workers in the same proportion. Return (workers, divisor). Nothing may vary."""
    fold = math.gcd(*(lane.num_envs for worker in workers for lane in worker.lanes))

    def fewer_envs(lanes: Sequence[LaneSlice]) -> tuple[LaneSlice, ...]:
        return tuple(evolve(lane, num_envs=lane.num_envs // fold) for lane in lanes)

    return [
        evolve(
            w,
            lanes=fewer_envs(w.lanes),
            served=fewer_envs(w.served),
            batching=evolve(w.batching, max_batch=w.batching.max_batch and w.batching.max_batch // fold),
        )
        for w in workers
    ], fold
