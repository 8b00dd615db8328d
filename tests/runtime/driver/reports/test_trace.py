"""Who worked and who waited: sums, clocks, bounds, and the file, of a run in one process and of one on Ray."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from chrome_trace import check_chrome

from vla_rl.core.plan import Batching, Slot
from vla_rl.core.spec.spec import parse_spec
from vla_rl.runtime.comm import tracing
from vla_rl.runtime.comm.tracing import CallRecorder, Event
from vla_rl.runtime.driver.reports import trace as module
from vla_rl.runtime.driver.reports.trace import Segment, Trace, find_causes, find_gaps
from vla_rl.runtime.placement.assignments import Assignment, LaneSlice
from vla_rl.runtime.start import run


def assigned(index, *roles):
    lanes = (LaneSlice(index=index, first_env=0, num_envs=4),)
    slot = Slot(roles=roles)
    return Assignment(
        index=index,
        slot=slot,
        lanes=lanes,
        served=lanes,
        homes=(index,) * len(lanes),
        batching=Batching(),
        rank=0,
        world=1,
    )


def trace_of(assignments, monkeypatch, now=(0.0,)):
    """A trace whose own clock shows these times, then the last of them."""
    times = list(now)
    monkeypatch.setattr(module, "monotonic", lambda: times.pop(0) if len(times) > 1 else times[0])
    return Trace(assignments)


def call(role, start, end, method="step", lane=0):
    main = method in {"begin", "step", "act", "update", "behaviour_cloning_update"}
    return Event(role, method, lane, float(start), float(end), main)


def test_recorder_keeps_lanes_and_counts_what_it_drops(monkeypatch):
    monkeypatch.setattr(tracing, "HELD_EVENTS", 2)
    recorder = CallRecorder()
    act, step, load = call("policy", 0.5, 0.6, "act", (0, 1)), call("sim", 0.6, 0.7), call("policy", 0.7, 0.8, "load")
    for event in (act, step, load):
        recorder.add(event)
    assert recorder.drain_events() == ([step, load], 1)
    assert recorder.drain_events() == ([], 0)


@pytest.mark.parametrize(
    ("role", "busy", "expected"),
    [
        ("sim", ["policy", "learner"], {"policy": 1.0}),
        ("sim", ["learner"], {"learner": 1.0}),
        ("sim", ["sim"], {"sim": 1.0}),
        ("learner", ["sim", "policy", "policy"], {"policy": 0.5, "sim": 0.5}),
        ("policy", [], {"messages": 1.0}),
    ],
)
def test_an_idle_role_waits_for_its_supplier_first(role, busy, expected):
    assert find_causes((0, role), [(i + 1, other) for i, other in enumerate(busy)]) == expected


def test_usage_adds_up(monkeypatch):
    """10 s: sim 0-3, policy 3-5, sim 5-6, none until the learner's 7-9."""
    trace = trace_of([assigned(0, "sim"), assigned(1, "policy"), assigned(2, "learner")], monkeypatch, (0.0, 10.0))
    drained = {
        0: ([call("sim", 0, 3), call("sim", 5, 6)], 0),
        1: ([call("policy", 3, 5, "act")], 0),
        2: ([call("learner", 7, 9, "update", None)], 0),
    }
    trace.add_events("training", 1, 100, drained)
    roles = trace.role_shares()
    assert roles["sim"] == {
        "workers": 1,
        "busy": 0.4,
        "waits_for": {"sim": 0.0, "policy": 0.2, "learner": 0.2, "messages": 0.2},
        "bubbles": 0.2,
    }
    assert roles["policy"]["waits_for"] == {"sim": 0.4, "policy": 0.0, "learner": 0.2, "messages": 0.2}
    assert roles["learner"]["waits_for"] == {"sim": 0.4, "policy": 0.2, "learner": 0.0, "messages": 0.2}
    assert roles["learner"]["bubbles"] == 0.0
    trace.add_events("evaluation", 1, 100, {0: ([call("sim", 10, 10)], 0)})
    assert trace.role_shares() == roles, "evaluations are not training"


def test_gaps_name_whom_they_wait_for():
    tracks = {(0, "sim"): [call("sim", 0, 3), call("sim", 6, 7)], (1, "policy"): [call("policy", 3.5, 6, "act")]}
    segment = Segment(kind="training", step=1, begin=0.0, end=8.0, env_steps=0, tracks=tracks)
    found = {(track, start, end): parts for track, start, end, parts in find_gaps(segment)}
    assert found[(0, "sim"), 3.0, 6.0] == {"messages": 0.5, "policy": 2.5}
    assert found[(1, "policy"), 0.0, 3.5] == {"sim": 3.0, "messages": 0.5}
    assert set(found) == {
        ((0, "sim"), 3.0, 6.0),
        ((0, "sim"), 7.0, 8.0),
        ((1, "policy"), 0.0, 3.5),
        ((1, "policy"), 6.0, 8.0),
    }


def test_clocks_of_other_machines_are_brought_to_the_drivers(monkeypatch):
    """Worker 1 is on another machine, 500 s ahead; its clock is read in the middle of a round trip."""
    now = SimpleNamespace(t=10.0)

    def monotonic():
        now.t += 0.25
        return now.t

    monkeypatch.setattr(tracing, "monotonic", monotonic)
    monkeypatch.setattr(tracing, "read_machine_clock", lambda: ("here", monotonic()))

    assert tracing.clock_ahead(lambda: ("here", now.t)) == 0.0
    ahead = tracing.clock_ahead(lambda: ("there", now.t + 0.125 + 500.0))
    assert ahead == 500.0

    trace = Trace([assigned(0, "sim"), assigned(1, "policy")])
    trace.clock_offsets = {0: 0.0, 1: ahead}
    trace.add_events("training", 1, 0, {0: ([call("sim", 11, 12)], 0), 1: ([call("policy", 512, 513)], 0)})
    tracks = trace.segments[0].tracks
    assert tracks[0, "sim"][0][3:5] == (11.0, 12.0)
    assert tracks[1, "policy"][0][3:5] == (12.0, 13.0)


def test_the_file_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "KEPT_EVENTS", 10)
    trace = trace_of([assigned(0, "sim")], monkeypatch, (0.0, 100.0))
    for step in range(5):
        trace.add_events(
            "training", step, step, {0: ([call("sim", 10 * step + i, 10 * step + i + 0.5) for i in range(4)], 0)}
        )
    assert [segment.step for segment in trace.segments] == [3, 4]
    assert trace.role_shares()["sim"]["busy"] == pytest.approx(0.1), "of all five iterations"
    trace.add_events("training", 5, 5, {0: ([call("sim", 50 + i, 50 + i + 0.5) for i in range(40)], 3)})
    assert sum(segment.event_count for segment in trace.segments) <= 10
    left = trace.segments[-1]
    assert left.begin == left.tracks[0, "sim"][0][3] - 0.5, "only its end"
    assert left.tracks[0, "sim"][-1][3] == 89.0
    trace.write_file(tmp_path, final=True)
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["dropped_events"] == 3


def test_writing_takes_a_hundredth_of_the_run_at_most(monkeypatch, tmp_path):
    trace = trace_of([assigned(0, "sim")], monkeypatch)
    times = iter([100.0, 102.0, 300.0, 303.0, 305.0])
    monkeypatch.setattr(module, "monotonic", lambda: next(times))
    trace.write_file(tmp_path)  # from 100 to 102: took 2 s
    (tmp_path / "trace.json").unlink()
    trace.write_file(tmp_path)  # at 300, 198 s later
    assert not (tmp_path / "trace.json").exists()
    trace.write_file(tmp_path, final=True)
    assert (tmp_path / "trace.json").exists()


SPEC = {
    "name": "traced",
    "plugins": ["vla_rl.testing.scripted", "vla_rl.testing.slot_placement"],
    "model": {"type": "linear"},
    "env": {"type": "scripted", "num_envs": 8},
    "rollout": {"chunk": 2, "episodes": 16, "group_size": 4},
    "algorithm": {"type": "grpo"},
    "train": {"steps": 2, "lr": 1e-2, "micro_batch": 16},
    "eval": {"before": False, "episodes_per_task": 2},
    "hooks": [{"type": "console"}],
}


@pytest.mark.parametrize(
    "changes",
    [
        {"runtime": {"backend": "local"}},
        pytest.param(
            {"placement": {"type": "slots", "stages": 2}, "env": {**SPEC["env"], "latency_s": 0.02}},
            marks=pytest.mark.ray,
        ),
    ],
    ids=["local", "ray"],
)
def test_a_run_writes_its_trace(tmp_path, capsys, changes):
    results = run(parse_spec({**SPEC, **changes}), tmp_path / "run", resume=False)
    data = json.loads((tmp_path / "run" / "trace.json").read_text())
    check_chrome(data)
    summary = capsys.readouterr().out.split("finished in")[1]
    assert "waits: sim" in summary
    assert "messages" in summary
    other, work = data["otherData"], [e for e in data["traceEvents"] if e.get("cat") == "work" and e["pid"]]
    assert [i["step"] for i in other["iterations"] if i["kind"] == "training"] == [1, 2]
    assert other["roles"] == results["roles"]
    sizes = other["sizes"]
    assert sizes["parameters"] >= sizes["trainable"] > 0 and sizes["trajectory_bytes"] > 0
    assert {role["workers"] for role in results["roles"].values()} == {1}
    for role in results["roles"].values():
        assert role["busy"] + sum(role["waits_for"].values()) == pytest.approx(1.0, abs=0.01)
    count = Counter((e["name"], str(e.get("args", {}).get("lane"))) for e in work)
    assert count["begin", "0"] == 3, "2 steps and an evaluation"
    if "placement" in changes:
        assert count["begin", "1"] == 2, "the first lane has rows enough for the evaluation"
        assert results["roles"]["sim"]["busy"] > 0
    assert count["update", "None"] == 2
    phases = [e["name"] for e in data["traceEvents"] if e["pid"] == 0 and e.get("cat") == "work"]
    assert phases.count("assemble") == phases.count("train") == 2
