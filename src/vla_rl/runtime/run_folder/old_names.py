"""Names in run folders of earlier versions, mapped to those of this one, so that such a run resumes, evaluates and
reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

SPEC_KEYS: Mapping[str, str] = {
    "warmup": "bc_warmup",
    "model.gradient_checkpointing": "model.recompute",
    "asynchrony.swap": "asynchrony.weights",
    "asynchrony.stream": "asynchrony.streaming_update",
    "asynchrony.replay.max_age": "asynchrony.replay.max_lag",
    "placement.window": "placement.batching",
    "placement.batching.max_wait": "placement.batching.max_wait_s",
    "env.rows_apart": "env.independent_envs",
    "world_model.rows": "world_model.num_envs",
    "env.processes.rows_per_process": "env.processes.envs_per_process",
    "imagination.fit_shut": "imagination.fit_updates_below_threshold",
    "imagination.measured": "imagination.evaluated_episodes",
    "imagination.gates": "imagination.quality_thresholds",
    "imagination.max_inflation": "imagination.max_over_estimation",
}
"""Key of a spec -> its name now, in the order in which they are renamed."""
SPEC_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "asynchrony.weights": {"request": "latest"},
    "placement.lanes": {"rows": "envs"},
    "model.recompute": {False: "off", True: "full"},
}
"""Key -> old value -> value now."""
NEW_KEYS: Mapping[str, Any] = {
    "rollout.engine": {"type": "torch"},
    "placement.weight_transfer": "auto",
    "trainer": {"type": "policy_gradient"},
    "imitation.trainer": {"type": "behaviour_cloning"},
}
"""Key that earlier versions did not have -> value that does what they did."""
STATE_KEYS: Mapping[str, str] = {
    "doing": "mode",
    "warmed_up": "bc_warmup_done",
    "practice": "imagination",
    "tickets.void": "tickets.discarded",
    "before.deviation": "before.repeats_std",
    "last.deviation": "last.repeats_std",
    "imagination.tickets.void": "imagination.tickets.discarded",
}
"""Key of a checkpoint's state.json -> its name now."""
RESULT_KEYS: Mapping[str, str] = {
    "doing": "mode",
    "before": "success_before",
    "deviation": "repeats_std",
    "practice": "imagination",
    "tickets.void": "tickets.discarded",
    "imagination.tickets.void": "imagination.tickets.discarded",
}
"""Key of results.json -> its name now."""
METRICS: Mapping[str, str] = {
    "faults/rows": "faults/envs",
    "rollout/playing_tickets": "rollout/running_tickets",
    "replay/age_mean": "replay/lag_mean",
    "replay/age_max": "replay/lag_max",
    "imagination/inflation": "imagination/over_estimation",
    "imagination/inflation_low": "imagination/over_estimation_low",
    "time/warmup": "time/bc_warmup",
}
"""Metric -> its name now."""
METRIC_PREFIXES: Mapping[str, str] = {"warmup/": "bc_warmup/", "imagination/gate_": "imagination/threshold_"}
"""First part of a metric's name -> the first part now."""

TRACE_CATEGORIES: Mapping[str, str] = {"beside": "concurrent"}
"""Category of an event in trace.json -> its name now."""
TRACE_CALLS: Mapping[str, str] = {
    "feed": "forward_backward",
    "leave": "offload_for",
    "come_back": "reload_for",
    "draw": "draw_starts",
    "over": "finish_step",
}
"""Call of a worker in trace.json -> its name now."""
TRACE_TRACKS: Mapping[str, str] = {"practice": "imagination"}
"""Track in trace.json -> its name now."""
TRACE_ASSIGNMENT_KEYS: Mapping[str, str] = {"rows": "lanes"}
"""Key of a worker's assignment in trace.json -> its name now."""


def current_trace(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace with the categories, calls and tracks of this version. Raises LookupError, TypeError or
    AttributeError for data that is no trace.
    """
    trace = dict(data)
    trace["traceEvents"] = [_current_event(event) for event in data["traceEvents"]]
    other = dict(data.get("otherData") or {})
    if "assignments" in other:
        other["assignments"] = [renamed(assignment, TRACE_ASSIGNMENT_KEYS) for assignment in other["assignments"]]
    trace["otherData"] = other
    return trace


def _current_event(event: Mapping[str, Any]) -> dict[str, Any]:
    current = dict(event)
    category = event.get("cat")
    if category in ("work", *TRACE_CATEGORIES):
        current["cat"] = TRACE_CATEGORIES.get(category, category)
        current["name"] = TRACE_CALLS.get(event["name"], event["name"])
    if event.get("ph") == "M" and event["name"] == "thread_name":
        track = event["args"]["name"]
        current["args"] = {**event["args"], "name": TRACE_TRACKS.get(track, track)}
    return current


def current_spec(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec's plain data with the keys and values of this version."""
    spec = renamed(data, SPEC_KEYS)
    for path, values in SPEC_VALUES.items():
        section, _, key = path.rpartition(".")
        for mapping in _mappings_at(spec, section):
            value = mapping.get(key)
            if isinstance(value, str | bool) and value in values:
                mapping[key] = values[value]
    for path, value in NEW_KEYS.items():
        section, _, key = path.rpartition(".")
        for mapping in _mappings_at(spec, section):
            mapping.setdefault(key, deepcopy(value))
    for placement in _mappings_at(spec, "placement"):
        if placement.get("type") == "collocated":
            placement.setdefault("cpu_workers", 1)
    for env in _mappings_at(spec, "env"):
        if env.get("type") == "gymnasium" and isinstance(env.get("camera"), Mapping):
            camera = dict(env.pop("camera"))
            env["cameras"] = {camera.pop("name", "main"): camera}
    return spec


def current_metric(name: str) -> str:
    """Return a metric's name in this version."""
    for old, new in METRIC_PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return METRICS.get(name, name)


def renamed(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a deep copy of nested plain data with the keys at these dotted paths renamed, and their order kept.

    Args:
        names: dotted path -> dotted path in the same mapping; a path that is missing, or whose new name is there
            already, is left as it is.
    """
    copy = deepcopy(dict(data))
    for old_path, new_path in names.items():
        section, _, old = old_path.rpartition(".")
        new = new_path.rpartition(".")[2]
        for mapping in _mappings_at(copy, section):
            if old in mapping and new not in mapping:
                items = [(new if key == old else key, value) for key, value in mapping.items()]
                mapping.clear()
                mapping.update(items)
    return copy


def _mappings_at(data: dict[str, Any], path: str) -> Iterator[dict[str, Any]]:
    """Yield the mapping at a dotted path ("": the whole), if there is one."""
    value: Any = data
    for key in path.split(".") if path else ():
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, dict):
        yield value
