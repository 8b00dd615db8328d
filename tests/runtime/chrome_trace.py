"""A check of trace files, for the tests of whatever writes one."""

from __future__ import annotations


def check_chrome(data):
    """What chrome://tracing and Perfetto need: complete events with numbers, named threads, slices that nest."""
    assert data["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list] = {}
    named = set()
    for event in data["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"], event["name"]))
            assert set(event["args"]) == {"name"}
            continue
        assert event["ph"] == "X"
        assert event["dur"] >= 0
        slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"], event["name"]))
    for thread, events in slices.items():
        assert {(*thread, "thread_name"), (*thread, "process_name")} <= named
        ends: list[float] = []
        for start, minus, name in sorted(events):
            while ends and ends[-1] <= start + 1e-3:
                ends.pop()
            assert not ends or start - minus <= ends[-1] + 1e-3, f"{name} at {start} reaches over its parent's end"
            ends.append(start - minus)
    return slices
