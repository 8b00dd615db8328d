"""Lanes: the stream observe -> act -> chunk_step of a slice of simulator rows, and the window that batches them.

The same function drives lanes inside a worker (direct calls) and from the driver (Ray calls): there it only chains
object references, so observations and actions go from actor to actor, and lanes overlap by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import Any

from attrs import frozen

from vla_rl.core.plan import Window

Call = Callable[..., Any]
"""(method, *arguments, returns=n) -> a reference, or a list of n references."""
Driving = Generator[list[Any], None, None]
"""Lanes being driven; it stops before it waits for the references that it yields."""


@frozen(kw_only=True)
class LaneSlice:
    """Rows first_row .. first_row + rows - 1 of the run."""

    index: int
    first_row: int
    rows: int


@frozen(kw_only=True)
class Lane:
    slice: LaneSlice
    sim: Call


@frozen(kw_only=True)
class Mode:
    """How a policy acts in a phase, and whether it keeps records for learning."""

    purpose: str
    greedy: bool
    keep: bool


def groups_of(lanes: Sequence[Lane], window: Window) -> list[list[Lane]]:
    """Consecutive lanes that are inferred together: as many as fit into `max_batch` rows."""
    if window.max_batch is None:
        return [list(lanes)]
    groups: list[list[Lane]] = []
    for lane in lanes:
        rows = sum(other.slice.rows for other in groups[-1]) if groups else 0
        if groups and rows + lane.slice.rows <= window.max_batch:
            groups[-1].append(lane)
        else:
            groups.append([lane])
    return groups


def drive(
    lanes: Sequence[Lane],
    policy: Call,
    mode: Mode,
    window: Window,
    begin: Callable[[Lane], tuple[Any, ...]],
    value_of: Callable[[Any], Any],
    ready: Callable[[Sequence[Any], float | None], list[Any]] | None = None,
    clock: Callable[[], float] = monotonic,
) -> Driving:
    """Run one round of every lane to its end, when it is iterated over.

    Args:
        begin: lane -> (method, *arguments) of its sim worker; the method returns (request, done).
        value_of: waits for a reference.
        ready: (references, timeout) -> those that are there; needed with `window.max_wait`.
        clock: by which requests wait, in seconds.
    """
    if window.max_wait is None:
        yield from _lockstep(groups_of(lanes, window), policy, mode, begin, value_of)
    elif ready is None:
        raise ValueError("a window with max_wait needs a backend that runs lanes side by side")
    else:
        _windowed(lanes, policy, mode, window, begin, value_of, ready, clock)


def side_by_side(drivings: Sequence[Driving], ready: Callable[[Sequence[Any], float | None], list[Any]]) -> None:
    """Run several to their ends, each going on as soon as what it waits for is there: lanes of one policy never wait
    for those of another. One that is alone waits by itself, without asking what is there."""
    begun = {i: next(driving, None) for i, driving in enumerate(drivings)}
    left = {i: references for i, references in begun.items() if references is not None}
    while len(left) > 1:
        there = set(ready([reference for references in left.values() for reference in references], None))
        for i, references in list(left.items()):
            left[i] = [reference for reference in references if reference not in there]
            if not left[i]:
                del left[i]
                more = next(drivings[i], None)
                if more is not None:
                    left[i] = more
    for i in left:
        for _ in drivings[i]:
            pass


def _act_and_step(group: Sequence[Lane], requests: Sequence[Any], policy: Call, mode: Mode) -> list[list[Any]]:
    indices = tuple(lane.slice.index for lane in group)
    actions = policy("act", mode, indices, *requests, returns=len(group))
    actions = actions if len(group) > 1 else [actions]
    return [lane.sim("step", lane.slice.index, a, returns=2) for lane, a in zip(group, actions, strict=True)]


def _lockstep(groups: list[list[Lane]], policy: Call, mode: Mode, begin: Any, value_of: Any) -> Driving:
    """Each group runs in step; the driver is one step ahead of the answers, so its own latency is hidden. The step
    that is issued after a group's end finds nothing to do."""
    state = {i: [lane.sim(*begin(lane), returns=2) for lane in group] for i, group in enumerate(groups)}
    while state:
        for i in list(state):
            issued = _act_and_step(groups[i], [request for request, _ in state[i]], policy, mode)
            yield [done for _, done in state[i]]
            over = all(value_of(done) for _, done in state[i])
            state[i] = issued
            if over:
                last = [done for _, done in state.pop(i)]
                yield last
                for done in last:
                    value_of(done)


def _windowed(
    lanes: Sequence[Lane],
    policy: Call,
    mode: Mode,
    window: Window,
    begin: Any,
    value_of: Any,
    ready: Any,
    clock: Callable[[], float],
) -> None:
    """Fire as soon as `max_batch` rows wait, or the oldest has waited `max_wait` seconds (from its own arrival)."""
    limit = window.max_batch or sum(lane.slice.rows for lane in lanes)
    running = {lane.slice.index: (lane, *lane.sim(*begin(lane), returns=2)) for lane in lanes}
    waiting: list[tuple[float, Lane, Any, bool]] = []
    while running or waiting:
        timeout = None if not waiting else max(0.0, waiting[0][0] + (window.max_wait or 0.0) - clock())
        if sum(lane.slice.rows for _, lane, _, _ in waiting) >= limit:
            timeout = 0.0
        if running:
            arrived = set(ready([done for _, _, done in running.values()], timeout))
            for index, (lane, request, done) in list(running.items()):
                if done in arrived:
                    del running[index]
                    waiting.append((clock(), lane, request, value_of(done)))
        rows = sum(lane.slice.rows for _, lane, _, _ in waiting)
        due = bool(waiting) and clock() - waiting[0][0] >= (window.max_wait or 0.0)
        if not (due or rows >= limit or not running):
            continue
        batch: list[tuple[float, Lane, Any, bool]] = []
        taken = 0
        while waiting and (not batch or taken + waiting[0][1].slice.rows <= limit):
            entry = waiting.pop(0)
            taken += entry[1].slice.rows
            batch.append(entry)
        steps = _act_and_step([lane for _, lane, _, _ in batch], [request for _, _, request, _ in batch], policy, mode)
        for (_, lane, _, over), (request, done) in zip(batch, steps, strict=True):
            if over:
                value_of(done)
            else:
                running[lane.slice.index] = (lane, request, done)
