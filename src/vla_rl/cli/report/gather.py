"""What a run folder holds, read leniently: a run that still goes on, or that broke, has a report as well."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.events import wilson
from vla_rl.core.spec.yaml import parse

Event = Mapping[str, Any]


@frozen(kw_only=True)
class Point:
    """A success rate at a step, with its 95 % Wilson interval."""

    step: int
    rate: float
    low: float
    high: float
    n: int


@frozen(kw_only=True, eq=False)
class Gathered:
    """All of it; what is not there is empty."""

    folder: Path
    spec: Mapping[str, Any]
    spec_text: str
    results: Mapping[str, Any] = field(factory=dict)
    environment: Mapping[str, Any] = field(factory=dict)
    steps: Sequence[Mapping[str, Any]] = ()
    """Metrics of each training step."""
    evaluations: Sequence[Point] = ()
    trace: Mapping[str, Any] = field(factory=dict)
    videos: Sequence[Path] = ()
    """Newest evaluation first."""

    @property
    def rollouts(self) -> list[Point]:
        """Success of each rollout."""
        return [
            _point(int(m["step"]), m["env/success_rate"], int(m["rollout/episodes"]))
            for m in self.steps
            if m.get("rollout/episodes")
        ]

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of a metric."""
        return [(m["step"], m[name]) for m in self.steps if isinstance(m.get(name), int | float)]


def gather(folder: Path) -> Gathered:
    """Read a run folder. Raises UserError when it is none."""
    spec_file = folder / "spec.yaml"
    if not spec_file.is_file():
        raise UserError(f"{folder} is not the folder of a run: it has no spec.yaml; give one that `vla-rl run` made")
    text = spec_file.read_text(encoding="utf-8")
    spec = parse(text).data
    lines = list(_lines(folder / "metrics.jsonl"))
    evaluations = {
        int(m["step"]): Point(
            step=int(m["step"]),
            rate=m["eval/success_rate"],
            low=m["eval/success_low"],
            high=m["eval/success_high"],
            n=int(m["eval/episodes"]),
        )
        for m in lines
        if "eval/success_rate" in m
    }
    steps = {int(m["step"]): m for m in lines if "time/step" in m}  # a resumed run may have written a step twice
    return Gathered(
        folder=folder,
        spec=spec if isinstance(spec, dict) else {},
        spec_text=text,
        results=_json(folder / "results.json"),
        environment=_json(folder / "environment.json"),
        steps=[steps[step] for step in sorted(steps)],
        evaluations=[evaluations[step] for step in sorted(evaluations)],
        trace=_json(folder / "trace.json"),
        videos=sorted((folder / "videos").glob("*.mp4"), key=_place),
    )


def _place(video: Path) -> tuple[str, str]:
    """Sorts the last evaluation first, and its episodes in order."""
    head, _, episode = video.stem.partition("_ep")
    return "".join(chr(0x10FFFF - ord(c)) for c in head), episode


def _point(step: int, rate: float, n: int) -> Point:
    interval = wilson(round(rate * n), n)
    return Point(step=step, rate=rate, low=interval.low, high=interval.high, n=n)


def _json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Records of a file whose last line may be half written."""
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            yield record
