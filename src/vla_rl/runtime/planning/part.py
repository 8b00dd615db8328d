"""The part of a job that has to be simulated. Workers that do the same beside each other need not all be: where nothing
is drawn one of each kind says what all do, and where latencies vary some of them do.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from vla_rl.core.plan import Plan, Window
from vla_rl.runtime.placement.assignments import Assignment, LaneSlice
from vla_rl.runtime.planning.profile import Profile
from vla_rl.runtime.scheduling.batching import Lane, groups_of

LANES = 32
"""As many are simulated at least, if there are so many."""
ROWS = 256
"""As many rows are simulated one by one, where rows take several tickets and a worker has several lanes."""
KINDS = 4
"""Teams that are simulated at least, where nothing varies, but teams differ."""


@define(eq=False)
class Server:
    """What does one thing at a time: a worker, or a device that several share."""

    free: float = 0.0


@frozen(kw_only=True)
class JobModel:
    workers: Mapping[int, Assignment]
    """Of simulators and policies."""
    learners: tuple[Assignment, ...]
    """All of the job."""
    servers: Mapping[int, Server]
    """Of each worker."""
    tickets: int
    """Of a training step, for these workers."""
    several: bool
    """The job has several policy workers."""
    publishes: bool
    """Some policies are apart from the learners."""
    moving: float
    """Seconds in which a step's roles leave their devices and come back."""
    widths: Mapping[int, int] = field(factory=dict)
    """Lane -> of how many sim workers, which do the same at once, its rows are; else 1."""
    fold: int = 1
    """Rows, and tickets, that do the same: one of each so many is simulated."""

    @property
    def policies(self) -> list[Assignment]:
        return [worker for worker in self.workers.values() if worker.served]

    def count(self, role: str) -> int:
        """Its workers."""
        if role == "sim":
            lanes = [[self.widths.get(lane.index, 1) for lane in worker.lanes] for worker in self.workers.values()]
            return sum(max(widths) for widths in lanes if widths)
        return len(self.policies if role == "policy" else self.learners)


def part_of(plan: Plan, assignments: Sequence[Assignment], profile: Profile, tickets: int, moving: float) -> JobModel:
    """Of a plan whose training steps play so many tickets."""
    servers = _servers(assignments)
    policies = [assignment for assignment in assignments if assignment.served]
    rows = sum(lane.rows for assignment in assignments for lane in assignment.lanes)
    kept = _typical(_teams(assignments, servers), servers, profile.varies)
    there = sum(lane.rows for worker in kept for lane in worker.lanes)
    widths, fold = dict[int, int](), 1
    exact = tickets == rows or all(len(policy.served) == 1 for policy in policies)
    if not profile.varies and tickets % rows == 0 and (exact or there > ROWS):
        kept, widths = _in_step(kept, servers)
        kept, fold = _folded(kept)
    return JobModel(
        workers={worker.index: worker for worker in kept},
        learners=tuple(assignment for assignment in assignments if assignment.rank >= 0),
        servers=servers,
        tickets=math.ceil(tickets * there / rows / fold),
        several=len(policies) > 1,
        publishes=any(assignment.rank < 0 for assignment in policies),
        moving=moving,
        widths=widths,
        fold=fold,
    )


def _servers(assignments: Sequence[Assignment]) -> dict[int, Server]:
    """A server for each worker; workers on one GPU take turns."""
    shared: dict[Hashable, Server] = {}
    found = {}
    for assignment in assignments:
        on_gpu = assignment.slot.gpus > 0 and assignment.slot.index is not None
        key: Hashable = (assignment.slot.node, assignment.slot.index) if on_gpu else assignment.index
        found[assignment.index] = shared.setdefault(key, Server())
    return found


def _teams(assignments: Sequence[Assignment], servers: Mapping[int, Server]) -> list[list[Assignment]]:
    """Simulators and policies that have to do with each other."""
    team = {assignment.index: assignment.index for assignment in assignments}

    def of(worker: int) -> int:
        while team[worker] != worker:
            team[worker] = worker = team[team[worker]]
        return worker

    first: dict[int, int] = {}
    for assignment in assignments:
        if assignment.lanes or assignment.served:
            for other in (*assignment.homes, first.setdefault(id(servers[assignment.index]), assignment.index)):
                team[of(other)] = of(assignment.index)
    found: dict[int, list[Assignment]] = {}
    for assignment in assignments:
        if assignment.lanes or assignment.served:
            found.setdefault(of(assignment.index), []).append(assignment)
    return list(found.values())


def _typical(teams: Sequence[Sequence[Assignment]], servers: Mapping[int, Server], varies: bool) -> list[Assignment]:
    """Of each kind of team so many that the kinds' shares stay about what they are."""
    kinds: dict[Hashable, list[Sequence[Assignment]]] = {}
    for team in teams:
        kinds.setdefault(_kind(team, servers), []).append(team)
    lanes = sum(len(worker.lanes) for team in teams for worker in team) / len(teams)
    most = math.ceil(LANES / lanes) if varies else 1 if len(kinds) == 1 else KINDS
    part = min(1.0, most / len(teams))
    return [worker for kind in kinds.values() for team in kind[: math.ceil(len(kind) * part)] for worker in team]


def _kind(team: Sequence[Assignment], servers: Mapping[int, Server]) -> Hashable:
    """Equal for teams that do the same."""
    place = {worker.index: i for i, worker in enumerate(team)}
    devices: dict[int, int] = {}

    def about(worker: Assignment) -> tuple[Any, ...]:
        device = devices.setdefault(id(servers[worker.index]), len(devices))
        lanes = (len(worker.lanes), len(worker.served), *{lane.rows for lane in (*worker.lanes, *worker.served)})
        return worker.slot.roles, worker.slot.cpus, device, lanes, tuple(place[home] for home in worker.homes)

    return tuple(about(worker) for worker in team)


def _in_step(workers: Sequence[Assignment], servers: Mapping[int, Server]) -> tuple[list[Assignment], dict[int, int]]:
    """Lanes of one inference, with a sim worker each that does nothing else, as one lane. -> (workers, lane -> its sim
    workers). Nothing may vary."""
    of_index = {worker.index: worker for worker in workers}
    uses: dict[int, int] = {}
    for worker in workers:
        uses[id(servers[worker.index])] = uses.get(id(servers[worker.index]), 0) + 1
    widths: dict[int, int] = {}
    for worker in workers:
        homes = [of_index[home] for home in worker.homes]
        alone = all(len(home.lanes) == 1 and not home.served and uses[id(servers[home.index])] == 1 for home in homes)
        if not worker.served or not alone or worker.side_by_side or worker.window.max_wait is not None:
            continue
        lanes, kept = list[LaneSlice](), list[int]()
        home_of = {lane.index: home for lane, home in zip(worker.served, homes, strict=True)}
        for group in groups_of([Lane(slice=lane, sim=_never) for lane in worker.served], worker.window):
            first = evolve(group[0].slice, rows=sum(lane.slice.rows for lane in group))
            home = home_of[first.index]
            widths[first.index] = len(group)
            for lane in group:
                of_index.pop(home_of[lane.slice.index].index, None)
            of_index[home.index] = evolve(home, lanes=(first,))
            lanes, kept = [*lanes, first], [*kept, home.index]
        of_index[worker.index] = evolve(worker, served=tuple(lanes), homes=tuple(kept))
    return list(of_index.values()), widths


def _folded(workers: Sequence[Assignment]) -> tuple[list[Assignment], int]:
    """Workers with fewer rows in the same proportions. -> (workers, how many times fewer). Nothing may vary."""
    fold = math.gcd(*(lane.rows for worker in workers for lane in worker.lanes))

    def fewer(lanes: Sequence[LaneSlice]) -> tuple[LaneSlice, ...]:
        return tuple(evolve(lane, rows=lane.rows // fold) for lane in lanes)

    def window(of: Window) -> Window:
        return of if of.max_batch is None else evolve(of, max_batch=of.max_batch // fold)

    return [evolve(w, lanes=fewer(w.lanes), served=fewer(w.served), window=window(w.window)) for w in workers], fold


def _never(*_: Any) -> None:
    raise AssertionError("lanes are only grouped here")
