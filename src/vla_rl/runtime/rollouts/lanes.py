"""Lanes: the stream observe -> act -> chunk_step of a slice of simulator rows, and the window that batches them.

A policy's worker drives the lanes that it acts for: it calls simulators of its own process directly and the others
through its peers, so observations and actions go from worker to worker, and lanes overlap by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import Any

from attrs import frozen

from vla_rl.core.plan import Window
from vla_rl.runtime.assignments import LaneSlice

Call = Callable[..., Any]
"""(method, *arguments) -> a reference to what it returns."""
Wait = tuple[list[Any], float | None]
"""References of which one has to be there, and the time at which the waiting ends in any case."""
Driving = Generator[Wait, None, None]
"""Lanes being driven; it stops before each wait."""


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
    ready: Callable[[Sequence[Any], float | None], list[Any]],
    clock: Callable[[], float] = monotonic,
) -> Driving:
    """Run one round of every lane to its end, when it is iterated over.

    Args:
        begin: lane -> (method, *arguments) of its simulator; that and "step" return a request.
        value_of: waits for a reference.
        ready: (references, timeout) -> those that are there, at least one unless the timeout came first.
        clock: by which requests wait, in seconds.
    """
    if window.max_wait is None:
        yield from _in_groups(groups_of(lanes, window), policy, mode, begin, value_of, ready)
    else:
        yield from _windowed(lanes, policy, mode, window, begin, value_of, ready, clock)


def _act_and_step(
    group: Sequence[Lane], references: Sequence[Any], policy: Call, mode: Mode, value_of: Any
) -> Generator[Wait, None, list[tuple[Lane, Any]]]:
    """One inference for the group, and a step of each of its lanes unless all are done: the last inference values
    final observations. -> the lanes with references to their next requests."""
    requests = [value_of(reference) for reference in references]
    acting = policy("act", mode, tuple(lane.slice.index for lane in group), *requests)
    yield [acting], None
    actions = value_of(acting)
    if all(request.done for request in requests):
        return []
    return [(lane, lane.sim("step", lane.slice.index, a)) for lane, a in zip(group, actions, strict=True)]


def _in_groups(groups: list[list[Lane]], policy: Call, mode: Mode, begin: Any, value_of: Any, ready: Any) -> Driving:
    """Infer for whichever group is complete first."""
    pending = [[(lane, lane.sim(*begin(lane))) for lane in group] for group in groups]
    there: set[int] = set()
    while pending:
        complete = next((i for i, group in enumerate(pending) if all(id(r) in there for _, r in group)), None)
        if complete is None:
            missing = [r for group in pending for _, r in group if id(r) not in there]
            yield missing, None
            there |= {id(r) for r in (ready(missing, None) if len(missing) > 1 else missing)}
            continue
        lanes, references = zip(*pending.pop(complete), strict=True)
        there.difference_update(map(id, references))
        further = yield from _act_and_step(lanes, references, policy, mode, value_of)
        if further:
            pending.append(further)


def _windowed(
    lanes: Sequence[Lane],
    policy: Call,
    mode: Mode,
    window: Window,
    begin: Any,
    value_of: Any,
    ready: Any,
    clock: Callable[[], float],
) -> Driving:
    """Fire as soon as `max_batch` rows wait, or the oldest has waited `max_wait` seconds (from its own arrival)."""
    limit = window.max_batch or sum(lane.slice.rows for lane in lanes)
    patience = window.max_wait or 0.0
    running = [(lane, lane.sim(*begin(lane))) for lane in lanes]
    waiting: list[tuple[float, Lane, Any]] = []
    while running or waiting:
        full = sum(lane.slice.rows for _, lane, _ in waiting) >= limit
        until = None if not waiting else clock() if full else waiting[0][0] + patience
        if running:
            expected = [reference for _, reference in running]
            yield expected, until
            arrived = {id(r) for r in ready(expected, None if until is None else max(0.0, until - clock()))}
            waiting += [(clock(), lane, reference) for lane, reference in running if id(reference) in arrived]
            running = [(lane, reference) for lane, reference in running if id(reference) not in arrived]
        full = sum(lane.slice.rows for _, lane, _ in waiting) >= limit
        due = bool(waiting) and clock() - waiting[0][0] >= patience
        if not (due or full or not running):
            continue
        batch: list[tuple[Lane, Any]] = []
        taken = 0
        while waiting and (not batch or taken + waiting[0][1].slice.rows <= limit):
            _, lane, reference = waiting.pop(0)
            taken += lane.slice.rows
            batch.append((lane, reference))
        group, references = zip(*batch, strict=True)
        running += yield from _act_and_step(group, references, policy, mode, value_of)
