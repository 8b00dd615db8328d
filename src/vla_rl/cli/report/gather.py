"""Reader of run folders. Unfinished and failed runs have a report as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from vla_rl.cli.report.checks import read_captions, read_metrics, read_results, read_trace
from vla_rl.core.errors import UserError
from vla_rl.core.events import Rate, wilson_interval
from vla_rl.core.spec.yaml import parse_yaml
from vla_rl.toolkit.json_files import read_record

EVALUATED = ("eval/success_rate", "eval/success_low", "eval/success_high", "eval/episodes")


@frozen(kw_only=True)
class Point(Rate):
    """The success rate at a step."""

    step: int


def pool_points(points: Sequence[Point]) -> Rate:
    """Return the success rate of the episodes of all points together."""
    return wilson_interval(sum(round(point.rate * point.n) for point in points), sum(point.n for point in points))


@frozen(kw_only=True, eq=False)
class ReportData:
    """Read all data of the run; missing parts are empty."""

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
    captions: Mapping[str, tuple[str, str]] = field(factory=dict)
    """Task and instruction of each video, by the name of its file; videos of older versions have none."""

    @property
    def rollout_points(self) -> list[Point]:
        """Success of each rollout."""
        points = []
        for m in self.steps:
            if m.get("rollout/episodes", 0) > 0 and "env/success_rate" in m:
                rate, n = m["env/success_rate"], int(m["rollout/episodes"])
                interval = asdict(wilson_interval(round(rate * n), n))
                points.append(Point(step=int(m["step"]), **{**interval, "rate": rate}))
        return points

    def spec_section(self, name: str) -> Mapping[str, Any]:
        """A section of the spec; empty if the spec has none."""
        value = self.spec.get(name)
        return value if isinstance(value, Mapping) else {}

    def metric_series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of a metric."""
        return [(m["step"], m[name]) for m in self.steps if name in m]


def find_run_spec(folder: Path) -> Path:
    """Return the spec of a run. Raises UserError for another folder."""
    spec_file = folder / "spec.yaml"
    if not spec_file.is_file():
        raise UserError(f"{folder} is not the folder of a run: it has no spec.yaml; give one that `vla-rl run` made")
    return spec_file


def read_report_data(folder: Path) -> ReportData:
    """Read a run folder. Raises UserError when it is none."""
    text = find_run_spec(folder).read_text(encoding="utf-8", errors="replace")
    spec = parse_yaml(text).data
    lines = list(read_metrics(folder / "metrics.jsonl"))
    environment = folder / "environment.json"
    evaluations = {
        int(m["step"]): Point(
            step=int(m["step"]),
            rate=m["eval/success_rate"],
            low=m["eval/success_low"],
            high=m["eval/success_high"],
            n=int(m["eval/episodes"]),
        )
        for m in lines
        if all(name in m for name in EVALUATED)
    }
    steps = {int(m["step"]): m for m in lines if "time/step" in m}  # a resumed run may have written a step twice
    return ReportData(
        folder=folder,
        spec=spec if isinstance(spec, dict) else {},
        spec_text=text,
        results=read_results(folder / "results.json"),
        environment=read_record(environment).data if environment.exists() else {},
        steps=[steps[step] for step in sorted(steps)],
        evaluations=[evaluations[step] for step in sorted(evaluations)],
        trace=read_trace(folder / "trace.json"),
        videos=sorted((folder / "videos").glob("*.mp4"), key=_video_order),
        captions=read_captions(folder / "videos"),
    )


def _video_order(video: Path) -> tuple[str, str]:
    """Sorts the last evaluation first, and its episodes in order."""
    head, _, episode = video.stem.partition("_ep")
    return "".join(chr(0x10FFFF - ord(c)) for c in head), episode
