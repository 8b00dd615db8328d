"""Trace of a run: when each worker worked and what it waited for, in `trace.json` (Chrome's format, opens in Perfetto).
A worker appends one tuple for each call. Once an iteration the driver fetches them, converts the times of other
machines to its own clock, sums up the waiting times by cause, and keeps the newest iterations for the file."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import define, evolve, field, frozen

from vla_rl.runtime.comm.tracing import CONCURRENT_TRACKS, CallRecorder, Event

if TYPE_CHECKING:
    from vla_rl.runtime.placement.assignments import Assignment, LaneSlice


Track = tuple[int, str]
"""(worker, role)."""

FILE = "trace.json"
ROLES = ("sim", "policy", "learner")
DRIVER: Track = (-1, "driver")
MESSAGES = "messages"
"""Cause of waiting while no worker works: messages between processes, and the driver."""
SUPPLIERS = {"sim": ("policy",), "policy": ("sim",), "learner": ("sim", "policy")}
"""Role -> roles whose results it needs to continue."""
KEPT_EVENTS = 20_000
"""Events in the file (about 3 MB). Older iterations are dropped, and the first part of one that is longer."""
LANE_THREADS = 10
"""Thread of lane 0 in the file, where lanes run concurrently."""
WRITING_SHARE = 0.01
"""Share of a run's time that may go into rewriting the file."""

F = TypeVar("F", bound=Callable[..., Any])


def traced(method: F) -> F:
    """Record the calls of a runtime method as a phase on the driver's track."""

    @wraps(method)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = monotonic()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.trace.driver_calls.add(Event("driver", method.__name__, None, start, monotonic()))

    return recorded  # type: ignore[return-value]


@frozen(kw_only=True)
class Segment:
    """Events between two fetches."""

    kind: str
    """ "start", "training", "evaluation" or "checkpoint"."""
    step: int
    begin: float
    end: float
    env_steps: int
    tracks: Mapping[Track, Sequence[Event]]
    """Track -> its calls, which never overlap, except those of concurrent lanes."""
    tickets: tuple[int, ...] = ()
    """Chunk steps of each ticket that the step consumed."""

    @property
    def event_count(self) -> int:
        return sum(map(len, self.tracks.values()))


@define
class Usage:
    """Time of the workers of one role in the training iterations, in worker seconds."""

    workers: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    bubbles: float = 0.0
    """Idle time between the first and the last of the role's main calls of an iteration."""
    waits: dict[str, float] = field(factory=dict)
    """Idle time by the role waited for: the one that supplies this role if it works, else any other, or `MESSAGES`."""

    def compute_shares(self) -> dict[str, Any]:
        """Return the shares of the workers' time, as `Trace.role_shares`."""
        total = self.seconds or 1.0
        return {
            "workers": self.workers,
            "busy": round(self.busy / total, 4),
            "waits_for": {role: round(self.waits.get(role, 0.0) / total, 4) for role in (*ROLES, MESSAGES)},
            "bubbles": round(self.bubbles / total, 4),
        }


class Trace:
    """The driver's end of the trace; `driver_calls` records the driver's phases."""

    def __init__(self, assignments: Sequence[Assignment]):
        self.assignments = assignments
        self.tracks = tuple((s.index, role) for s in assignments for role in ROLES if role in s.slot.roles)
        self.driver_calls = CallRecorder()
        self.segments: deque[Segment] = deque()
        self.usage: dict[str, Usage] = {}
        self.begin = monotonic()
        self.last = self.begin
        self.written_at = 0.0
        self.write_seconds = 0.0
        self.dropped = 0
        self.clock_offsets: dict[int, float] = {}
        """Seconds that each worker's clock is ahead of ours."""
        self.sizes: Mapping[str, float] = {}
        """Sizes of the model and of a trajectory, named as in `planning.profile.Profile`."""
        self.env_steps = 0
        """Environment steps of the run at the last call of `add`."""
        self.ticket_chunk_steps: Sequence[int] = ()
        """Chunk steps of each ticket that the running step consumes."""

    def add_events(self, kind: str, step: int, env_steps: int, drained: Mapping[int, tuple[list[Event], int]]) -> None:
        """Add what every worker recorded since the last call.

        Args:
            env_steps: environment steps of the run so far.
            drained: worker -> (its events, number of those that it dropped).
        """
        begin = self.last
        self.last = monotonic()
        new_env_steps = env_steps - self.env_steps
        self.env_steps = env_steps
        tracks: dict[Track, list[Event]] = {track: [] for track in self.tracks}
        for worker, (events, dropped) in drained.items():
            offset = self.clock_offsets.get(worker, 0.0)
            self.dropped += dropped
            for event in events:
                shifted = event._replace(start=event.start - offset, end=event.end - offset)
                tracks.setdefault((worker, event.role), []).append(shifted)
        segment = Segment(
            kind=kind,
            step=step,
            begin=begin,
            end=self.last,
            env_steps=new_env_steps,
            tracks=tracks,
            tickets=tuple(self.ticket_chunk_steps),
        )
        self.ticket_chunk_steps = ()
        if kind == "training":
            self._sum_up(segment)
        phases = {DRIVER: self.driver_calls.drain_events()[0]}
        self.segments.append(_newest_events(evolve(segment, tracks={**phases, **tracks})))
        while sum(s.event_count for s in self.segments) > KEPT_EVENTS:
            self.segments.popleft()

    def role_shares(self) -> dict[str, dict[str, Any]]:
        """Return role -> {"workers", "busy", "waits_for": {role: share}, "bubbles"}: shares of workers' time so far."""
        return {role: self.usage[role].compute_shares() for role in ROLES if role in self.usage}

    def write_file(self, folder: Path, *, final: bool = False) -> None:
        """Write the file, unless that was done so recently that it would cost more than a hundredth of the run."""
        start = monotonic()
        if not final and start - self.written_at < self.write_seconds / WRITING_SHARE:
            return
        partial = folder / f".{FILE}.partial"
        partial.write_text(json.dumps(self.to_chrome_format(), separators=(",", ":")), encoding="utf-8")
        os.replace(partial, folder / FILE)
        self.written_at = monotonic()
        self.write_seconds = self.written_at - start

    def to_chrome_format(self) -> dict[str, Any]:
        """Return the kept iterations in Chrome's format: a process a worker, a thread a role; times in microseconds."""
        others = {track for segment in self.segments for track in segment.tracks if track[1] in CONCURRENT_TRACKS}
        events = [*_track_names([DRIVER, *self.tracks, *sorted(others)])]
        lanes = {(s.index, "sim"): s.lanes for s in self.assignments if s.concurrent_lanes}
        events += [name for track, slices in lanes.items() for name in _lane_names(track, slices)]
        for segment in self.segments:
            label = segment.kind if segment.kind == "start" else f"{segment.kind} {segment.step}"
            events.append(self._make_slice(DRIVER, "iteration", label, segment.begin, segment.end))
            for track, calls in segment.tracks.items():
                kind = "concurrent" if track[1] in CONCURRENT_TRACKS else "work"
                for call in calls:
                    where = None if call.lane is None else {"lane": call.lane}
                    events.append(self._make_slice(track, kind, call.method, call.start, call.end, where))
                    if where is not None and track in lanes:
                        events[-1]["tid"] = LANE_THREADS + call.lane
            for track, start, end, parts in find_gaps(segment):
                main_cause = max(parts, key=lambda role: parts[role])
                milliseconds = {f"{role}_ms": round(1e3 * seconds, 3) for role, seconds in parts.items()}
                events.append(self._make_slice(track, "wait", f"waits for {main_cause}", start, end, milliseconds))
        iterations = [
            {"kind": s.kind, "step": s.step, "seconds": s.end - s.begin, "env_steps": s.env_steps, "tickets": s.tickets}
            for s in self.segments
        ]
        assignments = [
            {
                "worker": s.index,
                "roles": s.slot.roles,
                "device": s.slot.device,
                "cpus": s.slot.cpus,
                "local": s.is_local,
                "concurrent_lanes": s.concurrent_lanes,
                "lanes": {lane.index: lane.num_envs for lane in s.lanes},
                "served": {lane.index: lane.num_envs for lane in s.served},
            }
            for s in self.assignments
        ]
        other = {
            "assignments": assignments,
            "sizes": self.sizes,
            "iterations": iterations,
            "roles": self.role_shares(),
            "dropped_events": self.dropped,
        }
        return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}

    def _make_slice(
        self, track: Track, category: str, name: str, start: float, end: float, args: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        # Whole nanoseconds, so that slices nest.
        first = round(1e9 * (start - self.begin))
        last = round(1e9 * (end - self.begin))
        event = {"ph": "X", "pid": track[0] + 1, "tid": _thread_id(track[1]), "cat": category, "name": name}
        return {**event, "ts": first / 1e3, "dur": (last - first) / 1e3, **({"args": args} if args else {})}

    def _sum_up(self, segment: Segment) -> None:
        """Add the segment to the usage of each role."""
        tracks_of_role: dict[str, list[Track]] = {}
        for track in self.tracks:
            tracks_of_role.setdefault(track[1], []).append(track)
        seconds_of_mask: dict[int, float] = {}
        for start, end, mask in _track_states(segment, self.tracks):
            seconds_of_mask[mask] = seconds_of_mask.get(mask, 0.0) + end - start
        for role, tracks in tracks_of_role.items():
            usage = self.usage.setdefault(role, Usage(workers=len(tracks)))
            usage.seconds += len(tracks) * (segment.end - segment.begin)
            calls = [call for track in tracks for call in segment.tracks[track]]
            spans = [span for track in tracks for span in _busy_spans(segment.tracks[track])]
            usage.busy += sum(end - start for start, end in spans)
            main = [call for call in calls if call.main]
            if main:
                first, last = min(call.start for call in main), max(call.end for call in main)
                within = sum(end - start for start, end in spans if first <= start and end <= last)
                usage.bubbles += len(tracks) * (last - first) - within
        for mask, seconds in seconds_of_mask.items():
            for role, worker_seconds in _waited_for(mask, self.tracks).items():
                for cause, share in worker_seconds.items():
                    waited = self.usage[role].waits
                    waited[cause] = waited.get(cause, 0.0) + share * seconds


def find_gaps(segment: Segment) -> Iterator[tuple[Track, float, float, dict[str, float]]]:
    """Yield every gap between two calls of a track: (track, start, end, role waited for -> seconds)."""
    tracks = [track for track in segment.tracks if track[1] in ROLES]
    open_gaps: dict[Track, tuple[float, dict[str, float]]] = {}
    blamed: dict[int, list[tuple[Track, dict[str, float]]]] = {}
    for start, end, mask in _track_states(segment, tracks):
        if mask not in blamed:
            blamed[mask] = [
                (t, find_causes(t, _busy_tracks(mask, tracks))) for i, t in enumerate(tracks) if not mask >> i & 1
            ]
        idle = dict(blamed[mask])
        for track in [track for track in open_gaps if track not in idle]:
            began, parts = open_gaps.pop(track)
            yield track, began, start, parts
        for track, shares in idle.items():
            parts = open_gaps.setdefault(track, (start, {}))[1]
            for role, share in shares.items():
                parts[role] = parts.get(role, 0.0) + share * (end - start)
    for track, (began, parts) in open_gaps.items():
        yield track, began, segment.end, parts


def find_causes(track: Track, busy: Sequence[Track]) -> dict[str, float]:
    """Return the roles that an idle track waits for while `busy` ones work, as shares that add up to 1."""
    roles = {role for _, role in busy if role in SUPPLIERS.get(track[1], ())} or {role for _, role in busy}
    return {role: 1.0 / len(roles) for role in sorted(roles)} if roles else {MESSAGES: 1.0}


def _waited_for(mask: int, tracks: Sequence[Track]) -> dict[str, dict[str, float]]:
    """Return role -> roles that its idle workers wait for, in numbers of workers. Bit i of `mask`: track i is busy."""
    result: dict[str, dict[str, float]] = {}
    busy = _busy_tracks(mask, tracks)
    for i, track in enumerate(tracks):
        if not mask >> i & 1:
            total = result.setdefault(track[1], {})
            for role, share in find_causes(track, busy).items():
                total[role] = total.get(role, 0.0) + share
    return result


def _busy_tracks(mask: int, tracks: Sequence[Track]) -> list[Track]:
    return [track for i, track in enumerate(tracks) if mask >> i & 1]


def _busy_spans(calls: Iterable[Event]) -> list[tuple[float, float]]:
    """Return the intervals in which at least one of the calls was running."""
    spans: list[tuple[float, float]] = []
    for start, end in sorted((call.start, call.end) for call in calls):
        if spans and start < spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


def _track_states(segment: Segment, tracks: Sequence[Track]) -> Iterator[tuple[float, float, int]]:
    """Yield (start, end, bits of the busy tracks), from the segment's begin to its end."""
    changes = []
    for i, track in enumerate(tracks):
        for start, end in _busy_spans(segment.tracks[track]):
            changes += [(max(start, segment.begin), 1 << i), (min(end, segment.end), 1 << i)]
    changes.sort()
    now, mask = segment.begin, 0
    for at, bit in changes:
        if at > now:
            yield now, at, mask
            now = at
        mask ^= bit
    if segment.end > now:
        yield now, segment.end, mask


def _newest_events(segment: Segment) -> Segment:
    """Return the segment, or as much of its end as can be kept."""
    if segment.event_count <= KEPT_EVENTS:
        return segment
    ends = sorted(call.end for calls in segment.tracks.values() for call in calls)
    since = ends[-KEPT_EVENTS // 2]
    tracks = {track: [call for call in calls if call.start >= since] for track, calls in segment.tracks.items()}
    return evolve(segment, begin=since, tracks=tracks)


def _track_names(tracks: Iterable[Track]) -> Iterator[dict[str, Any]]:
    for worker, role in tracks:
        track = {"ph": "M", "pid": worker + 1, "tid": _thread_id(role)}
        yield {**track, "name": "process_name", "args": {"name": "driver" if worker < 0 else f"worker {worker}"}}
        yield {**track, "name": "thread_name", "args": {"name": role}}


def _lane_names(track: Track, lanes: Iterable[LaneSlice]) -> Iterator[dict[str, Any]]:
    """Yield the names of concurrent lanes, each of which has a thread."""
    for lane in lanes:
        thread = {"ph": "M", "pid": track[0] + 1, "tid": LANE_THREADS + lane.index}
        yield {**thread, "name": "process_name", "args": {"name": f"worker {track[0]}"}}
        yield {**thread, "name": "thread_name", "args": {"name": f"{track[1]}, lane {lane.index}"}}


def _thread_id(role: str) -> int:
    return (*ROLES, "driver", *CONCURRENT_TRACKS).index(role) + 1
