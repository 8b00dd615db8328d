"""Latencies of a job: given in a small JSON file, or measured by a run and read from its `trace.json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from attrs import define, evolve, field, frozen
from attrs import validators as v

from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import Problems, Structurer
from vla_rl.core.spec.yaml import dotted

Event = Mapping[str, Any]
Seconds = float | tuple[float, ...]
MESSAGE = 0.0002
"""Seconds, where none were measured."""
ROLLOUT = ("begin_train", "step", "act")


def _positive(instance: Any, attribute: Any, value: Seconds) -> None:
    values = value if isinstance(value, tuple) else (value,)
    if not values or min(values) < 0:
        raise ValueError("must be seconds >= 0: a number, or a list of measured ones to draw from")


@frozen(kw_only=True)
class Cost:
    """Seconds of a call, for a number of rows."""

    seconds: Seconds = field(validator=_positive)
    """A number, or measured ones, from which the simulation draws."""
    rows: float = field(default=1.0, validator=v.gt(0))
    """Rows that played in the call that took so long, or their mean; for learners ranks."""
    fixed: float = field(default=0.0, validator=[v.ge(0.0), v.le(1.0)])
    """Part of the time that does not depend on the rows: 0, the time is proportional to them; 1, they run in
    parallel."""
    cpus: float | None = field(default=None, validator=v.optional(v.gt(0)))
    """CPUs of the worker, where they bound the time (of simulators, or of models on CPUs); null: they do not."""

    def draw(self, random: Random, share: float) -> float:
        """Seconds of one call on so much more (or less) than was measured."""
        seconds = random.choice(self.seconds) if isinstance(self.seconds, tuple) else self.seconds
        return seconds * (self.fixed + (1 - self.fixed) * share)

    @property
    def mean(self) -> float:
        return _mean(self.seconds) if isinstance(self.seconds, tuple) else self.seconds

    def share(self, size: float, cpus: float) -> float:
        """`draw`'s, for so many times the rows, on so many CPUs."""
        return size * (1.0 if self.cpus is None else self.cpus / max(cpus, 1.0))


NOTHING = Cost(seconds=0.0)


@frozen(kw_only=True)
class Profile:
    """What the simulation needs to know of a job."""

    chunk_steps: int | tuple[int, ...] = field()
    """Chunk steps of a ticket: a number, or measured ones, from which the simulation draws."""
    env_steps: float | None = field(default=None, validator=v.optional(v.gt(0)))
    """Environment steps (single actions) of a ticket; null: chunk_steps times rollout.chunk."""
    sim: Cost
    """A chunk step of simulation."""
    policy: Cost
    """An inference."""
    learner: Cost = NOTHING
    """All optimiser steps of one iteration; `rows` are learner ranks."""
    reset: Cost = NOTHING
    """The reset of rows that take tickets."""
    publish: float = field(default=0.0, validator=v.ge(0))
    """Seconds until policies apart from the learners have new weights."""
    offload: Mapping[str, float] = field(factory=dict)
    """Role -> seconds to leave its device and to come back, in each iteration, where the plan offloads it."""
    message: float = field(default=MESSAGE, validator=v.ge(0))
    """Seconds from the end of a call in one worker to the start of the next in another."""
    turn: float = field(default=0.0, validator=v.ge(0))
    """Seconds from the end of a call to the start of the next in the same worker, which was there already."""
    rest: float = field(default=0.0, validator=v.ge(0))
    """Seconds of an iteration in which no worker works: rollouts collected and judged, metrics written."""
    parameters: float | None = None
    """Of the model."""
    trainable: float | None = None
    """Parameters with a gradient; null: all."""
    weight_bytes: float = 2.0
    """Of a parameter."""

    @offload.validator
    def _offload(self, attribute: Any, value: Mapping[str, float]) -> None:
        unknown = set(value) - {"sim", "policy", "learner"}
        if unknown:
            raise ValueError(f"{min(unknown)!r} is no role; there are: sim, policy, learner")

    @property
    def varies(self) -> bool:
        """Something is drawn."""
        drawn = [self.chunk_steps, *(cost.seconds for cost in (self.sim, self.policy, self.learner, self.reset))]
        return any(isinstance(values, tuple) and len(set(values)) > 1 for values in drawn)

    @property
    def steady(self) -> Profile:
        """With means in place of all that is drawn."""
        costs = {name: getattr(self, name) for name in ("sim", "policy", "learner", "reset")}
        steps = self.chunk_steps
        return evolve(
            self,
            chunk_steps=steps if isinstance(steps, int) else max(1, round(_mean(steps))),
            **{name: evolve(cost, seconds=cost.mean) for name, cost in costs.items()},
        )


def load_profile(files: Sequence[Path]) -> Profile:
    """A profile file, a run's trace, or several traces of one job with other numbers of rows, from which follows how
    much of a call's time depends on them. Raises UserError."""
    found = [_load(file / "trace.json" if file.is_dir() else file) for file in files]
    first = found[0]
    if len(found) == 1:
        return first
    sim, policy, learner = (_joined([getattr(p, role) for p in found]) for role in ("sim", "policy", "learner"))
    return evolve(first, sim=sim, policy=policy, learner=learner)


def _load(file: Path) -> Profile:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UserError(f"{file} cannot be read: {exc}; give RUN/trace.json of a run, or a profile") from exc
    except ValueError as exc:
        raise UserError(f"{file} is not JSON: {exc}") from exc
    if isinstance(data, dict) and "traceEvents" in data:
        return from_trace(data, str(file))
    try:
        profile: Profile = Structurer().read_class(data, Profile)
    except Problems as exc:
        raise UserError("\n".join(f"{file}: {dotted(path)}: {text}" for path, text in exc.items)) from exc
    return profile


@define
class _Round:
    """Of a lane. Inferences for several lanes are the first one's."""

    begin: Event
    steps: list[Event] = field(factory=list)
    acts: list[Event] = field(factory=list)


def from_trace(data: Mapping[str, Any], source: str = "the trace") -> Profile:
    """What a run's training iterations cost. Raises UserError for a trace without any."""
    events = sorted((e for e in data["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"])
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("training ")]
    work = [e for e in events if e["cat"] == "work" and e["pid"] and any(a <= e["ts"] < b for a, b in spans)]
    assignments = {assignment["worker"] + 1: assignment for assignment in data["otherData"]["assignments"]}
    rounds: list[_Round] = []
    running: dict[int, _Round] = {}
    updates = []
    for event in work:
        lane = _lanes(event.get("args", {}).get("lane", -1))[0]
        if event["name"] == "begin_train":
            running[lane] = _Round(event)
            rounds.append(running[lane])
        elif event["name"] in ("step", "act") and lane in running:
            (running[lane].steps if event["name"] == "step" else running[lane].acts).append(event)
        elif event["name"] == "update":
            updates.append(event)
    if not any(r.acts for r in rounds):
        raise UserError(f"{source} holds no training iteration; give that of a run that trained")
    between = _between(rounds, spans)
    for played in rounds:
        del played.acts[-1:]  # it chooses nothing, and values final observations at most
    sims = next(assignment for assignment in assignments.values() if assignment["rows"])
    rows = max(sims["rows"].values())
    batch = statistics.mode(
        sum(_row_counts(assignments)[lane] for lane in _lanes(e["args"]["lane"])) for e in work if e["name"] == "act"
    )
    ranks = sum("learner" in assignment["roles"] for assignment in assignments.values())
    training = [i for i in data["otherData"]["iterations"] if i["kind"] == "training"]
    env_steps = sum(iteration["env_steps"] for iteration in training) / (len(rounds) * rows)
    message, turn = _delays(work, assignments)
    publish = _mean(_seconds(e for e in events if e["name"] == "publish" and any(a <= e["ts"] < b for a, b in spans)))
    return Profile(
        chunk_steps=tuple(max(1, len(r.steps)) for r in rounds),
        env_steps=env_steps or None,
        sim=Cost(seconds=_seconds(e for r in rounds for e in r.steps), rows=rows),
        policy=Cost(seconds=_seconds(e for r in rounds for e in r.acts), rows=batch, cpus=_cpus(assignments, "policy")),
        learner=Cost(seconds=_seconds(updates) or 0.0, rows=ranks, cpus=_cpus(assignments, "learner")),
        reset=Cost(seconds=_seconds(r.begin for r in rounds), rows=rows),
        publish=publish,
        message=message,
        turn=turn,
        between=between,
        rest=max(0.0, _rest(work, spans) - publish),
        **data["otherData"].get("model", {}),
    )


def _joined(costs: Sequence[Cost]) -> Cost:
    """One cost of measurements at several sizes: the line through their means, by least squares."""
    points = [(c.rows, c.mean) for c in costs]
    if len({rows for rows, _ in points}) < 2 or not points[0][1]:
        return costs[0]
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    whole = slope * costs[0].rows + intercept
    return evolve(costs[0], fixed=min(max(intercept / whole, 0.0), 1.0))


def _delays(work: Sequence[Event], assignments: Mapping[int, Mapping[str, Any]]) -> tuple[float, float]:
    """`message` and `turn`: mean seconds until a call begins after the one that it waits for, in another worker, or
    after the last one of its own worker, whichever ended later."""
    if all(assignment["local"] for assignment in assignments.values() if assignment["rows"]):
        return MESSAGE, 0.0
    came: dict[tuple[str, int], float] = {}
    free: dict[int, float] = {}
    messages: list[float] = []
    turns: list[float] = []
    for event in work:
        name, end = event["name"], _end(event)
        if name not in ROLLOUT:
            continue
        lanes, idle = _lanes(event["args"]["lane"]), free.get(event["pid"], 0.0)
        if name != "begin_train":
            supplier = "sim" if name == "act" else "policy"
            ready = max(came.get((supplier, lane), 0.0) for lane in lanes)
            delay = max(0.0, event["ts"] - max(ready, idle)) / 1e6
            (messages if ready > idle else turns).append(delay)
        came.update({("policy" if name == "act" else "sim", lane): end for lane in lanes})
        free[event["pid"]] = end
    return _mean(messages), _mean(turns)


def _between(rounds: Sequence[_Round], spans: Sequence[tuple[float, float]]) -> float:
    """Mean seconds from the end of a round to the begin of the next of the same iteration."""
    gaps = []
    for begin, end in spans:
        inside = sorted(
            (r.begin["ts"], _end((r.steps or [r.begin])[-1])) for r in rounds if begin <= r.begin["ts"] < end
        )
        ended = 0.0
        for start, stop in inside:
            if ended and start > ended:
                gaps.append((start - ended) / 1e6)
            ended = max(ended, stop)
    return _mean(gaps)


def _cpus(assignments: Mapping[int, Mapping[str, Any]], role: str) -> float | None:
    """CPUs of a role's workers where models compute on them."""
    there = [assignment for assignment in assignments.values() if role in assignment["roles"]]
    return max(1.0, there[0]["cpus"]) if there and there[0]["device"] == "cpu" else None


def _rest(work: Sequence[Event], spans: Sequence[tuple[float, float]]) -> float:
    """Mean seconds of an iteration outside its rollout and its update."""
    left = []
    for begin, end in spans:
        inside = [e for e in work if begin <= e["ts"] < end]
        covered = 0.0
        for names in (ROLLOUT, ("update",)):
            part = [e for e in inside if e["name"] in names]
            covered += max(map(_end, part), default=0.0) - min((e["ts"] for e in part), default=0.0)
        left.append(max(0.0, end - begin - covered) / 1e6)
    return _mean(left)


def _row_counts(assignments: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    return {int(lane): rows for assignment in assignments.values() for lane, rows in assignment["rows"].items()}


def _seconds(events: Iterable[Event]) -> tuple[float, ...]:
    return tuple(e["dur"] / 1e6 for e in events)


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _lanes(lane: int | list[int]) -> list[int]:
    return lane if isinstance(lane, list) else [lane]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
