"""The files of a run, checked before they are shown: a run folder may come from anybody."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError
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
