"""Charts as SVG text. Colours are CSS classes of the page, so that they follow its light and dark theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import TypeVar

from attrs import frozen

from vla_rl.cli.report.gather import Point

MAX_POINTS = 400
T = TypeVar("T")
Pairs = Sequence[tuple[float, float]]


@frozen
class ChartShape:
    """Shape of a wide chart. A page holds the same chart as `SCREEN` and as `PHONE`, and shows the one that fits the
    window; `IMAGE` stands alone in a file, and its labels can be read where it is scaled to the width of a phone."""

    css: str
    width: float
    height: float


SCREEN, PHONE, IMAGE = (
    ChartShape("screen", 960.0, 340.0),
    ChartShape("phone", 340.0, 220.0),
    ChartShape("image", 640.0, 320.0),
)


@frozen(kw_only=True)
class Frame:
    """A plot area inside an SVG, and its scales."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def map_point(self, x: float, y: float) -> tuple[float, float]:
        return self.map_x(x), self.map_y(y)

    def map_x(self, x: float) -> float:
        low, high = self.x
        return self.left + (x - low) / ((high - low) or 1.0) * (self.width - self.left - self.right)

    def map_y(self, y: float) -> float:
        low, high = self.y
        return self.height - self.bottom - (y - low) / ((high - low) or 1.0) * (self.height - self.top - self.bottom)


def success_chart(rollouts: Sequence[Point], evaluations: Sequence[Point], last: int, shape: ChartShape) -> str:
    """Rollout success as a line in its band, evaluations as dots with their intervals."""
    frame = Frame(
        width=shape.width, height=shape.height, left=60, right=16, top=14, bottom=40, x=(0, max(last, 1)), y=(0.0, 1.0)
    )
    parts = [*_draw_grid(frame, [0, 0.25, 0.5, 0.75, 1.0], lambda v: f"{100 * v:.0f} %", "step")]
    points = _thin_points(rollouts)
    if points:
        upper = [frame.map_point(p.step, p.high) for p in points]
        lower = [frame.map_point(p.step, p.low) for p in reversed(points)]
        parts.append(f'<path class="band" d="{_path_data([*upper, *lower])}Z"/>')
        parts.append(f'<path class="line" d="{_path_data([frame.map_point(p.step, p.rate) for p in points])}"/>')
    if len(evaluations) > 1:
        parts.append(
            f'<path class="eval-line" d="{_path_data([frame.map_point(p.step, p.rate) for p in evaluations])}"/>'
        )
    for p in evaluations:
        x, y = frame.map_point(p.step, p.rate)
        description = f"step {p.step}: {100 * p.rate:.1f} % [{100 * p.low:.1f}, {100 * p.high:.1f}] of {p.n} episodes"
        bar = f'<path d="M{x:.1f} {frame.map_y(p.low):.1f}V{frame.map_y(p.high):.1f}"/>'
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        parts.append(f'<g class="eval"><title>{escape(description)}</title>{bar}{dot}</g>')
    return wrap_svg(frame.width, frame.height, parts, "Success over training steps", shape.css)


def small_chart(name: str, pairs: Pairs, band: Sequence[Pairs] = ()) -> str:
    """One metric, small; `band`: its lower and its upper ends, or nothing."""
    values = [value for of_line in (pairs, *band) for _, value in of_line]
    low, high = min(values), max(values)
    ends = min(x for x, _ in pairs), max(x for x, _ in pairs)
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    frame = Frame(width=250, height=125, left=46, right=14, top=10, bottom=24, x=ends, y=(low - room, high + room))
    parts = [*_draw_grid(frame, axis_ticks(*frame.y, 3), format_number, "")]
    if band:
        lower, upper = ([frame.map_point(*pair) for pair in _thin_points(end)] for end in band)
        parts.append(f'<path class="band" d="{_path_data([*upper, *reversed(lower)])}Z"/>')
    parts.append(f'<path class="line" d="{_path_data([frame.map_point(*pair) for pair in _thin_points(pairs)])}"/>')
    return wrap_svg(frame.width, frame.height, parts, name)


def metric_figure(name: str, label: str, pairs: Pairs, band: Sequence[Pairs] = ()) -> str:
    """A metric as a small chart, under its label and its last value."""
    return (
        f'<figure><figcaption title="{escape(name)}">{escape(label)}<b>{format_number(pairs[-1][1])}</b></figcaption>'
        f"{small_chart(label, pairs, band)}</figure>"
    )


def axis_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about this many round numbers between two, and at least two: one alone gives no scale."""
    span = (high - low) or 1.0
    size = 10 ** math.floor(math.log10(span / count))
    step = next(size * k for k in (1, 2, 5, 10) if span / (size * k) <= count)
    first = math.ceil(low / step)
    values = [step * i for i in range(first, math.floor(high / step) + 1)]
    return values if len(values) > 1 or high == low else axis_ticks(low, high, count + 1)


def format_number(value: float) -> str:
    """Short, for axes and tiles."""
    if value == 0:
        return "0"
    if abs(value) >= 1e4 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.4g}"


def wrap_svg(width: float, height: float, parts: Sequence[str], title: str, css: str = "") -> str:
    """A drawing of this size in its own units, which is scaled to the page."""
    box = f"0 0 {width:g} {height:g}"
    head = f'<svg class="{css}" viewBox="{box}" role="img" aria-label="{escape(title, quote=True)}">'
    return f"{head}{''.join(parts)}</svg>"


def _draw_grid(frame: Frame, values: Sequence[float], label: Callable[[float], str], x_title: str) -> Iterator[str]:
    right = frame.width - frame.right
    for value in values:
        y = frame.map_y(value)
        yield f'<path class="grid" d="M{frame.left} {y:.1f}H{right}"/>'
        yield f'<text class="tick" x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label(value))}</text>'
    floor = frame.height - frame.bottom
    for value in axis_ticks(*frame.x, 8 if frame.width > 500 else 3):
        if value == int(value):
            x = frame.map_x(value)
            yield f'<text class="tick" x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{int(value)}</text>'
    if x_title:
        middle = (frame.left + right) / 2
        yield f'<text class="tick" x="{middle}" y="{frame.height - 4}" text-anchor="middle">{escape(x_title)}</text>'


def _path_data(points: Pairs) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _thin_points(items: Sequence[T]) -> list[T]:
    """Return at most `MAX_POINTS` items, including the first and the last."""
    if len(items) <= MAX_POINTS:
        return list(items)
    return [items[round(i * (len(items) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]
