"""Lanes (observe -> act -> chunk_step of a slice of the envs) and the dynamic batching of their requests. A policy's
worker drives the lanes that it acts for. It calls simulators in the same process directly and the others through its
peers, so observations and actions go from worker to worker, and lanes overlap by themselves."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from time import monotonic
from typing import Any

from attrs import define, field, frozen

from vla_rl.core.plan import Batching
from vla_rl.runtime.messages.requests import PolicyMode
from vla_rl.runtime.placement.assignments import LaneSlice

Call = Callable[..., Any]
"""(method, *arguments) -> a reference to the result."""
Wait = tuple[list[Any], float | None]
"""References of which at least one has to be there, and the time at which waiting ends anyway (None: never)."""
Driving = Generator[Wait, None, None]
"""Generator that drives lanes; it yields before each wait."""


@frozen(kw_only=True)
class Lane:
    """A lane, and the function that calls its simulator."""

    slice: LaneSlice
    sim: Call


Pair = tuple[Lane, Any]
"""A lane, and the reference to its next request."""


def inference_groups(lanes: Sequence[Lane], batching: Batching) -> list[list[Lane]]:
    """Return groups of consecutive lanes that are inferred together: as many as fit into `max_batch` envs."""
    if batching.max_batch is None:
        return [list(lanes)]
    groups: list[list[Lane]] = []
    for lane in lanes:
        envs = sum(other.slice.num_envs for other in groups[-1]) if groups else 0
        if groups and envs + lane.slice.num_envs <= batching.max_batch:
            groups[-1].append(lane)
        else:
            groups.append([lane])
    return groups


def drive_lanes(
    lanes: Sequence[Lane],
    policy: Call,
    mode: PolicyMode,
    batching: Batching,
    tickets: Callable[[Lane, int, int, int], Sequence[Any]],
    value_of: Callable[[Any], Any],
    ready: Callable[[Sequence[Any], float | None], list[Any]],
    clock: Callable[[], float] = monotonic,
) -> Driving:
    """Roll out tickets on the lanes while there are any, as the generator is iterated over.

    Args:
        tickets: (lane, number of its envs that are free, number that certainly end with their next chunk, number of
            tickets that wait there) -> tickets that the lane gets.
        value_of: waits for a reference and returns its value.
        ready: (references, timeout in seconds) -> those that are there, at least one unless the timeout came first.
        clock: clock for the waiting time of requests, in seconds.
    """
    driver = _LaneDriver(policy, mode, tickets, value_of, ready, clock, resting=list(lanes))
    if batching.max_wait_s is None:
        return driver.in_groups(inference_groups(lanes, batching))
    return driver.in_dynamic_batches(lanes, batching)


@define
class _LaneDriver:
    """State of one `drive_lanes`: the lanes that rest, and those that have begun."""

    policy: Call
    mode: PolicyMode
    tickets: Callable[[Lane, int, int, int], Sequence[Any]]
    value_of: Callable[[Any], Any]
    ready: Callable[[Sequence[Any], float | None], list[Any]]
    clock: Callable[[], float]
    resting: list[Lane]
    """Lanes with nothing to roll out."""
    begun: set[int] = field(factory=set)

    def wake_lanes(self, lanes: Iterable[Lane]) -> list[Pair]:
        """Start those of the resting lanes that get tickets now. Return them with the references to their requests."""
        woken = []
        for lane in lanes:
            if lane in self.resting and (tickets := self.tickets(lane, lane.slice.num_envs, 0, 0)):
                self.resting.remove(lane)
                index = lane.slice.index
                if index in self.begun:
                    woken.append((lane, lane.sim("step", index, None, tickets)))
                else:
                    self.begun.add(index)
                    woken.append((lane, lane.sim("begin", index, self.mode.purpose, tickets)))
        return woken

    def act_and_step(self, pairs: Sequence[Pair]) -> Generator[Wait, None, list[Pair]]:
        """Run one inference for these lanes, which also values final observations, and step lanes that continue."""
        requests = [self.value_of(reference) for _, reference in pairs]
        acting = self.policy("act", self.mode, tuple(lane.slice.index for lane, _ in pairs), *requests)
        yield [acting], None
        further = []
        for (lane, _), request, actions in zip(pairs, requests, self.value_of(acting), strict=True):
            free = lane.slice.num_envs - len(request.positions)
            tickets = self.tickets(lane, free, request.ending, request.waiting)
            if tickets or not request.done:
                further.append((lane, lane.sim("step", lane.slice.index, actions, tickets)))
            else:
                self.resting.append(lane)
        return further

    def in_groups(self, groups: Sequence[Sequence[Lane]]) -> Driving:
        """Run inference for whichever group is complete first."""
        pending: dict[int, list[Pair]] = {}
        arrived: set[int] = set()
        while True:
            for i, group in enumerate(groups):
                if i not in pending and (woken := self.wake_lanes(group)):
                    pending[i] = woken
            if not pending:
                return
            complete = next((i for i, pairs in pending.items() if all(id(r) in arrived for _, r in pairs)), None)
            if complete is None:
                missing = [r for pairs in pending.values() for _, r in pairs if id(r) not in arrived]
                yield missing, None
                arrived |= {id(r) for r in (self.ready(missing, None) if len(missing) > 1 else missing)}
                continue
            pairs = pending.pop(complete)
            arrived.difference_update(id(reference) for _, reference in pairs)
            further = yield from self.act_and_step(pairs)
            further += self.wake_lanes(groups[complete])
            if further:
                pending[complete] = further

    def in_dynamic_batches(self, lanes: Sequence[Lane], batching: Batching) -> Driving:
        """Run inference as soon as `max_batch` envs wait, or the oldest request has waited `max_wait_s` seconds."""
        limit = batching.max_batch or sum(lane.slice.num_envs for lane in lanes)
        patience = batching.max_wait_s or 0.0
        running: list[Pair] = []
        waiting: list[tuple[float, Lane, Any]] = []
        while True:
            running += self.wake_lanes(lanes)
            if not running and not waiting:
                return
            full = sum(lane.slice.num_envs for _, lane, _ in waiting) >= limit
            until = None if not waiting else self.clock() if full else waiting[0][0] + patience
            if running:
                expected = [reference for _, reference in running]
                yield expected, until
                timeout = None if until is None else max(0.0, until - self.clock())
                arrived = {id(r) for r in self.ready(expected, timeout)}
                waiting += [(self.clock(), lane, r) for lane, r in running if id(r) in arrived]
                running = [(lane, r) for lane, r in running if id(r) not in arrived]
            full = sum(lane.slice.num_envs for _, lane, _ in waiting) >= limit
            due = bool(waiting) and self.clock() - waiting[0][0] >= patience
            if due or full or not running:
                running += yield from self.act_and_step(_take_batch(waiting, limit))


def _take_batch(waiting: list[tuple[float, Lane, Any]], limit: int) -> list[Pair]:
    """Remove the oldest requests from `waiting`, as many as fit into `limit` envs, and at least one."""
    batch: list[Pair] = []
    envs = 0
    while waiting and (not batch or envs + waiting[0][1].slice.num_envs <= limit):
        _, lane, reference = waiting.pop(0)
        envs += lane.slice.num_envs
        batch.append((lane, reference))
    return batch
