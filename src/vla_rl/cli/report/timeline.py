"""The timeline of a training iteration as SVG, from the run's trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from attrs import field, frozen

from vla_rl.cli.report.charts import PHONE, SCREEN, ChartShape, axis_ticks, format_number, wrap_svg

Event = Mapping[str, Any]
ROW, GAP = 22.0, 6.0
CLOSE_STEPS = 8
"""Chunk steps of a lane that the close look shows."""
MERGED_PX = 0.35
"""Calls that are closer than this are drawn as one."""


@frozen(kw_only=True)
class Track:
    """A row of the timeline."""

    name: str
    role: str
    calls: list[Event] = field(factory=list)


def draw_timelines(trace: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, SVG of each shape): the last training iteration, the begin of its rollout from near; or none."""
    events = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X"]
    iterations = [e for e in events if e["cat"] == "iteration" and e["name"].startswith("training ")]
    if not iterations:
        return []
    last = iterations[-1]
    begin, end = last["ts"], last["ts"] + last["dur"]
    if end <= begin:
        return []
    tracks = list(_read_tracks(trace["traceEvents"], begin, end))
    drawings = [(f"Step {last['name'].split()[-1]}, {last['dur'] / 1e6:,.2f} s", _draw_shapes(tracks, begin, end))]
    acts = sorted(e["ts"] for track in tracks for e in track.calls if e["name"] == "act")
    lanes = {str(e.get("args", {}).get("lane")) for track in tracks for e in track.calls if e["name"] == "act"}
    near = CLOSE_STEPS * max(len(lanes), 1)
    if len(acts) > 2 * near and acts[near] > acts[0]:
        title = f"The begin of its rollout, {(acts[near] - acts[0]) / 1e3:,.0f} ms"
        drawings.append((title, _draw_shapes(tracks, acts[0], acts[near])))
    return drawings


def _read_tracks(events: Sequence[Event], begin: float, end: float) -> Iterator[Track]:
    """Yield the tracks with calls between two times, the driver first; concurrent lanes share one."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    roles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    of_track: dict[tuple[int, str], list[Event]] = {
        (pid, name.partition(",")[0]): [] for (pid, _), name in sorted(roles.items())
    }
    for e in events:
        thread = (e["pid"], e["tid"])
        if e.get("cat") in ("work", "concurrent") and begin <= e["ts"] < end and thread in roles:
            of_track[e["pid"], roles[thread].partition(",")[0]].append(e)
    for (pid, role), calls in of_track.items():
        if calls:
            process = processes.get(pid, f"process {pid}")
            name = process if pid == 0 else f"{process}: {role}"
            yield Track(name=name, role=role, calls=sorted(calls, key=lambda e: e["ts"]))


def _draw_shapes(tracks: Sequence[Track], begin: float, end: float) -> str:
    return "".join(_draw_in(shape, tracks, begin, end) for shape in (SCREEN, PHONE))


def _draw_in(shape: ChartShape, tracks: Sequence[Track], begin: float, end: float) -> str:
    width = shape.width
    left = 150.0 if shape is SCREEN else 124.0
    height = len(tracks) * (ROW + GAP) + 34
    scale = (width - left - 8) / (end - begin)
    parts = []
    for value in axis_ticks(0.0, (end - begin) / 1e6, 8 if shape is SCREEN else 3):
        x = left + value * 1e6 * scale
        parts.append(f'<path class="grid" d="M{x:.1f} 0V{height - 26:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - 8:.1f}" text-anchor="middle">{format_number(value)} s</text>'
        )
    for i, track in enumerate(tracks):
        y = i * (ROW + GAP) + 4
        parts.append(
            f'<text class="label" x="{left - 10}" y="{y + ROW - 6:.1f}" text-anchor="end">{escape(track.name)}</text>'
        )
        parts.append(f'<rect class="idle" x="{left}" y="{y:.1f}" width="{width - left - 8:.1f}" height="{ROW}"/>')
        for x, length, names, lane in _merge_bars(track.calls, begin, end, scale):
            shade = f" lane{lane % 4}" if lane is not None else ""
            parts.append(
                f'<rect class="{escape(track.role)}{shade}" x="{left + x:.2f}" y="{y:.1f}" width="{length:.2f}" '
                f'height="{ROW}"><title>{escape(names)}</title></rect>'
            )
    return wrap_svg(width, height, parts, "Timeline of a training step", shape.css)


def _merge_bars(
    calls: Sequence[Event], begin: float, end: float, scale: float
) -> Iterator[tuple[float, float, str, int | None]]:
    """(x, width, what, lane); calls too close to tell apart are one bar."""
    bar: tuple[float, float, str, int | None] | None = None
    count = 1
    for call in calls:
        if call["ts"] + call["dur"] < begin or call["ts"] > end:
            continue
        x = (max(call["ts"], begin) - begin) * scale
        stop = (min(call["ts"] + call["dur"], end) - begin) * scale
        lanes = call.get("args", {}).get("lane")
        lane = lanes[0] if isinstance(lanes, list) and len(lanes) == 1 else lanes if isinstance(lanes, int) else None
        if bar is not None and x - bar[1] < MERGED_PX and (stop - x < 2 * MERGED_PX or bar[1] - bar[0] < 2 * MERGED_PX):
            count += 1
            bar = (bar[0], max(stop, bar[1]), f"{count} calls", bar[3])
            continue
        if bar is not None:
            yield bar[0], max(bar[1] - bar[0], MERGED_PX), bar[2], bar[3]
        count = 1
        where = "" if lanes is None else f", lane {', '.join(map(str, lanes)) if isinstance(lanes, list) else lanes}"
        bar = (x, stop, f"{call['name']}{where}: {call['dur'] / 1e3:,.1f} ms", lane)
    if bar is not None:
        yield bar[0], max(bar[1] - bar[0], MERGED_PX), bar[2], bar[3]
