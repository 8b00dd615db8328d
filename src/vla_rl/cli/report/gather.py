"""Reader of run folders. Unfinished and failed runs have a report as well."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from vla_rl.core.errors import UserError
from vla_rl.core.events import Rate, wilson_interval
from vla_rl.core.spec.yaml import parse_yaml
from vla_rl.runtime.run_folder.state_file import check_rate
from vla_rl.toolkit.json_files import LARGEST, LARGEST_NUMBER, Record, read_record

TRACE_BYTES = 1 << 30
"""Size of a trace that is read; hours of a large run have some hundred megabytes."""
RATES, TASKS = ("success", "success_before"), ("tasks", "tasks_before")
COUNTS = ("steps", "env_steps", "faults", "immediate_successes")


def read_results(file: Path) -> Mapping[str, Any]:
    """results.json, or nothing where the run has none yet. Raises UserError for one that no run writes."""
    if not file.exists():
        return {}
    results = read_record(file)
    for key in RATES:
        if results.has_value(key):
            check_rate(results.get_record(key))
    for key in TASKS:
        for rate in results.get_records(key).values() if results.data.get(key) else ():
            check_rate(rate)
    for key in COUNTS:
        if results.has_value(key):
            results.get_integer(key)
    if results.has_value("wall_seconds"):
        results.get_number("wall_seconds", low=0)
    for key in ("imagination", "versions"):
        results.get_section(key)
    if results.has_value("missing"):
        results.list_of_records("missing")
    if results.has_value("checkpoint"):
        results.get_record("checkpoint").get_records("keys")
    if not isinstance(results.data.get("notes") or [], list):
        raise UserError(f"{file}: 'notes' is not a list, a list of texts is expected")
    if results.data.get("roles"):
        check_roles(results.get_record("roles"))
    return results.data


def read_trace(file: Path) -> Mapping[str, Any]:
    """trace.json without the events that no run writes, or nothing. Raises UserError."""
    if not file.exists():
        return {}
    trace = read_record(file, limit=TRACE_BYTES)
    events = trace.data.get("traceEvents") or []
    about: Mapping[str, Any] = trace.get_record("otherData").data if trace.data.get("otherData") else {}
    if about.get("roles"):
        check_roles(trace.get_record("otherData").get_record("roles"))
    if not isinstance(events, list):
        raise UserError(f"{file}: 'traceEvents' is not a list")
    return {"traceEvents": [event for event in events if _is_event(event)], "otherData": about}


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """Records of metrics.jsonl: the step, and those metrics that are numbers. The last line may be half written."""
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] <= LARGEST:
            yield {name: value for name, value in record.items() if _is_number(value)}


def read_captions(folder: Path) -> dict[str, tuple[str, str]]:
    """Return task and instruction of each video by its file's name, from the lists that the hook `video` writes next to
    them. Raises UserError."""
    return {
        episode.get_text("file"): (episode.get_text("task"), episode.get_text("instruction"))
        for file in sorted(folder.glob("step_*.json"))
        for episode in read_record(file).list_of_records("episodes")
    }


def check_roles(roles: Record) -> None:
    """Raise UserError unless each role has its shares of time."""
    for role in roles.records_here().values():
        role.get_integer("workers")
        for key in ("busy", "bubbles"):
            role.get_number(key)
        waits = role.get_record("waits_for")
        for cause in waits.data:
            waits.get_number(cause)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def _is_event(event: Any) -> bool:
    """Return whether `timeline` can draw the event."""
    if not isinstance(event, dict) or not isinstance(event.get("args", {}), dict):
        return False
    if not all(isinstance(event.get(key), int) for key in ("pid", "tid")) or not isinstance(event.get("name"), str):
        return False
    if event.get("ph") != "X":
        return isinstance(event.get("args", {}).get("name"), str)
    return isinstance(event.get("cat"), str) and all(_is_number(event.get(key)) for key in ("ts", "dur"))


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
