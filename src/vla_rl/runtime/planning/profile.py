"""Latencies of a job: given in a small JSON file, or measured by a run and read from its `trace.json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from attrs import evolve, field, frozen
from attrs import validators as v

from vla_rl.core.errors import UserError
from vla_rl.core.paths import error_reason, read_text
from vla_rl.core.spec.structure import Problems, Structurer
from vla_rl.core.spec.yaml import dotted_path

Event = Mapping[str, Any]
Seconds = float | tuple[float, ...]
LONGEST_TRACE = 500_000_000
"""Characters."""
MESSAGE = 0.0002
"""Default of `Profile.message`, in seconds, where none was measured."""
ROLLOUT = ("begin", "step", "act")


def _check_positive(instance: Any, attribute: Any, value: Seconds) -> None:
    values = value if isinstance(value, tuple) else (value,)
    if not values or min(values) < 0:
        raise ValueError("must be seconds >= 0: a number, or a list of measured ones to draw from")


@frozen(kw_only=True)
class Cost:
    """Seconds of a call, for a number of envs."""

    seconds: Seconds = field(validator=_check_positive)
    """A number, or measured values, from which the simulation draws."""
    num_envs: float = field(default=1.0, validator=v.gt(0))
    """Number of envs that took part in the measured call, or its mean; for learners the number of ranks."""
    fixed: float = field(default=0.0, validator=[v.ge(0.0), v.le(1.0)])
    """Share of the time that is the same for any number of envs: 0, none is; 1, envs run in parallel."""
    cpus: float | None = field(default=None, validator=v.optional(v.gt(0)))
    """CPUs of the worker, where they bound the time (of simulators, or of models on CPUs); null: they do not."""
    each: bool = False
    """For simulators: seconds of one env, whose call runs its envs concurrently: it takes as long as the slowest."""

    def draw_seconds(self, random: Random, share: float, num_envs: int = 1) -> float:
        """Return the seconds of one call with `share` times the measured load and with `num_envs` envs."""
        if self.each:
            return max(self._draw_one(random) for _ in range(num_envs))
        return self._draw_one(random) * (self.fixed + (1 - self.fixed) * share)

    def _draw_one(self, random: Random) -> float:
        return random.choice(self.seconds) if isinstance(self.seconds, tuple) else self.seconds

    @property
    def mean(self) -> float:
        return _mean_or_zero(self.seconds) if isinstance(self.seconds, tuple) else self.seconds

    def load_share(self, size: float, cpus: float) -> float:
        """Return the load for `draw_seconds`: `size` times the envs, on this many CPUs."""
        return size * (1.0 if self.cpus is None else self.cpus / max(cpus, 1.0))


NOTHING = Cost(seconds=0.0)


def _check_whole_call(instance: Any, attribute: Any, value: Cost) -> None:
    if value.each:
        raise ValueError("each: true is for sim and reset, whose envs run concurrently; give seconds of a call")


@frozen(kw_only=True)
class Profile:
    """Latencies and sizes of a job, as the simulation needs them."""

    chunk_steps: int | tuple[int, ...] = field()
    """Chunk steps of a ticket: a number, or measured values, from which the simulation draws."""
    env_steps: float | None = field(default=None, validator=v.optional(v.gt(0)))
    """Environment steps (single actions) of a ticket; null: chunk_steps times rollout.chunk."""
    sim: Cost
    """Cost of a chunk step of simulation."""
    policy: Cost = field(validator=_check_whole_call)
    """Cost of an inference."""
    learner: Cost = field(default=NOTHING, validator=_check_whole_call)
    """Cost of all optimiser steps of one iteration; `num_envs` is the number of learner ranks."""
    reset: Cost = NOTHING
    """Cost of the reset of envs that take tickets."""
    publish: float = field(default=0.0, validator=v.ge(0))
    """Seconds until policies in other workers than the learners have new weights."""
    offload: Mapping[str, float] = field(factory=dict)
    """Role -> seconds to leave its device and to come back, in each iteration, where the plan offloads it."""
    message: float = field(default=MESSAGE, validator=v.ge(0))
    """Seconds from the end of a call in one worker to the start of the next one in another."""
    turn: float = field(default=0.0, validator=v.ge(0))
    """Seconds from a call's end to the start of the next one in the same worker, which was queued there."""
    rest: float = field(default=0.0, validator=v.ge(0))
    """Seconds of an iteration in which no worker works: rollouts are assembled and scored, metrics are written."""
    parameters: float | None = None
    """Number of the model's parameters."""
    trainable: float | None = None
    """Number of parameters with a gradient; null: all."""
    masters: float = 0.0
    """Number of parameters that have a float32 master, because they are trained and act in a narrower type."""
    weight_bytes: float = 2.0
    """Bytes of a parameter."""
    trajectory_bytes: float | None = field(default=None, validator=v.optional(v.gt(0)))
    """Host memory of the longest trajectory that waits to be trained on, in bytes."""

    @offload.validator
    def _check_roles(self, attribute: Any, value: Mapping[str, float]) -> None:
        unknown = set(value) - {"sim", "policy", "learner"}
        if unknown:
            raise ValueError(f"{min(unknown)!r} is not a role; the roles are: sim, policy, learner")

    @property
    def has_variation(self) -> bool:
        """True where something is drawn."""
        drawn = [self.chunk_steps, *(cost.seconds for cost in (self.sim, self.policy, self.learner, self.reset))]
        return any(isinstance(values, tuple) and len(set(values)) > 1 for values in drawn)

    @property
    def steady_profile(self) -> Profile:
        """Return the profile with means in place of all that is drawn."""
        costs = {name: getattr(self, name) for name in ("sim", "policy", "learner", "reset")}
        steps = self.chunk_steps
        return evolve(
            self,
            chunk_steps=steps if isinstance(steps, int) else max(1, round(_mean_or_zero(steps))),
            **{name: evolve(cost, seconds=cost.mean) for name, cost in costs.items()},
        )


def load_profile(files: Sequence[Path]) -> Profile:
    """Load a profile file, a run's trace, or several traces of one job with different numbers of envs, which show how
    much of a call's time depends on that number. Raises UserError."""
    profiles = [_read_profile(file / "trace.json" if file.is_dir() else file) for file in files]
    first = profiles[0]
    if len(profiles) == 1:
        return first
    sim, policy, learner = (_fit_cost([getattr(p, role) for p in profiles]) for role in ("sim", "policy", "learner"))
    return evolve(first, sim=sim, policy=policy, learner=learner)


def _read_profile(file: Path) -> Profile:
    try:
        data = json.loads(read_text(file, LONGEST_TRACE))
    except OSError as exc:
        raise UserError(
            f"{file} cannot be read: {error_reason(exc)}; give RUN/trace.json of a run, or a profile"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise UserError(f"{file} is not JSON: {exc}") from exc
    if isinstance(data, dict) and "traceEvents" in data:
        try:
            return from_trace(data, str(file))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as exc:
            raise UserError(
                f"{file} is not a run's trace ({type(exc).__name__}: {exc}); give RUN/trace.json as the run wrote it"
            ) from exc
    try:
        profile: Profile = Structurer().read_class(data, Profile)
    except Problems as exc:
        raise UserError("\n".join(f"{file}: {dotted_path(path)}: {text}" for path, text in exc.items)) from exc
    return profile


def from_trace(data: Mapping[str, Any], source: str = "the trace") -> Profile:
    """Return the costs of a run's training iterations. The first iteration counts only if it is the only one, since
    caches are cold then. Raises UserError for a trace without training iterations."""
    events = sorted((e for e in data["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"])
    iterations = [i for i in data["otherData"]["iterations"] if i["kind"] == "training"]
    iterations = [i for i in iterations if i["step"] > 1] or iterations
    names = {f"training {iteration['step']}" for iteration in iterations}
    spans = [(e["ts"], _event_end(e)) for e in events if e["name"] in names]
    inside = [e for e in events if e["cat"] == "work" and any(begin <= e["ts"] < end for begin, end in spans)]
    work = [e for e in inside if e["pid"]]
    begins, steps = ([e for e in work if e["name"] == name] for name in ("begin", "step"))
    acts = _choosing_inferences(work)
    if not acts or not steps:
        raise UserError(f"{source} holds no training iteration; give that of a run that trained")
    assignments = {assignment["worker"] + 1: assignment for assignment in data["otherData"]["assignments"]}
    counts = {int(lane): count for assignment in assignments.values() for lane, count in assignment["lanes"].items()}
    each = max(counts.values()) == 1 and any(assignment["concurrent_lanes"] for assignment in assignments.values())
    envs, batch = max(counts.values()), statistics.mode(sum(counts[lane] for lane in _event_lanes(e)) for e in acts)
    lengths = [length for iteration in iterations for length in iteration["tickets"]]
    sim, reset = _without_resets(_event_seconds(steps), _event_seconds(begins), len(lengths) / envs - len(begins))
    ranks = sum("learner" in assignment["roles"] for assignment in assignments.values())
    message, turn = _measure_delays(work, assignments)
    publish = _median_or_zero(_event_seconds(e for e in inside if e["name"] == "publish"))
    return Profile(
        chunk_steps=tuple(lengths),
        env_steps=sum(iteration["env_steps"] for iteration in iterations) / len(lengths) or None,
        sim=Cost(seconds=sim, num_envs=min(envs, sum(lengths) / len(steps)), each=each),
        policy=Cost(
            seconds=_event_seconds(acts),
            num_envs=min(batch, sum(lengths) / len(acts)),
            cpus=_role_cpus(assignments, "policy"),
        ),
        learner=Cost(
            seconds=_learning_seconds(work, spans) or 0.0, num_envs=ranks, cpus=_role_cpus(assignments, "learner")
        ),
        reset=Cost(seconds=reset, num_envs=envs, each=each),
        publish=publish,
        message=message,
        turn=turn,
        rest=max(0.0, _rest_seconds(work, spans) - publish),
        **data["otherData"].get("sizes", {}),
    )


def _learning_seconds(work: Sequence[Event], spans: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Return the seconds of each rank in each iteration: the update, with the parts that began before it."""
    seconds: dict[tuple[int, int], float] = {}
    for event in work:
        if event["name"] in ("forward_backward", "update"):
            iteration = next(i for i, (begin, end) in enumerate(spans) if begin <= event["ts"] < end)
            rank = iteration, event["pid"]
            seconds[rank] = seconds.get(rank, 0.0) + event["dur"] / 1e6
    return tuple(seconds.values())


def _choosing_inferences(work: Sequence[Event]) -> list[Event]:
    """Return the inferences after which a lane continues; the others only value final observations."""
    following: dict[int, str] = {}
    choosing = []
    for event in reversed(work):
        if event["name"] not in ROLLOUT:
            continue
        if event["name"] == "act" and any(following.get(lane) == "step" for lane in _event_lanes(event)):
            choosing.append(event)
        following.update((lane, event["name"]) for lane in _event_lanes(event))
    return choosing[::-1]


def _without_resets(
    steps: tuple[float, ...], begins: tuple[float, ...], inside: float
) -> tuple[tuple[float, ...], float]:
    """Remove the resets from the seconds of chunk steps; `inside`: number of lane resets in them. The resets are in the
    longest chunk steps, so these are cut down to one level, but not below the median. Return (seconds of the steps,
    seconds of a lane's reset)."""
    reset = _median_or_zero(begins)
    if inside <= 0 or not reset:
        return steps, reset
    ordered, over = sorted(steps, reverse=True), 0.0
    level, middle = ordered[0], statistics.median(steps)
    for i, after in enumerate([*ordered[1:], 0.0], 1):
        following = max(after, middle)
        part = min(i * (level - following), inside * reset - over)
        over, level = over + part, level - part / i
        if level > following or level <= middle:
            break
    return tuple(min(seconds, level) for seconds in steps), over / inside


def _fit_cost(costs: Sequence[Cost]) -> Cost:
    """Return one cost from measurements at several sizes: the line through their means, by least squares."""
    points = [(c.num_envs, c.mean) for c in costs]
    if len({envs for envs, _ in points}) < 2 or not points[0][1]:
        return costs[0]
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    total = slope * costs[0].num_envs + intercept
    return evolve(costs[0], fixed=min(max(intercept / total, 0.0), 1.0))


def _measure_delays(work: Sequence[Event], assignments: Mapping[int, Mapping[str, Any]]) -> tuple[float, float]:
    """Return `message` and `turn`: median seconds until a call begins after the one that it waits for in another
    worker, or after the last one in the same worker, whichever ended later."""
    if all(assignment["local"] for assignment in assignments.values() if assignment["lanes"]):
        return MESSAGE, 0.0
    came: dict[tuple[str, int], float] = {}
    free: dict[tuple[int, int | None], float] = {}
    messages: list[float] = []
    turns: list[float] = []
    for event in work:
        name, end = event["name"], _event_end(event)
        if name not in ROLLOUT:
            continue
        lanes, alone = _event_lanes(event), name != "act" and assignments[event["pid"]]["concurrent_lanes"]
        worker = (event["pid"], lanes[0] if alone else None)
        idle = free.get(worker, 0.0)
        if name != "begin":
            supplier = "sim" if name == "act" else "policy"
            ready = max(came.get((supplier, lane), 0.0) for lane in lanes)
            delay = max(0.0, event["ts"] - max(ready, idle)) / 1e6
            (messages if ready > idle else turns).append(delay)
        came.update({("policy" if name == "act" else "sim", lane): end for lane in lanes})
        free[worker] = end
    return _median_or_zero(messages), _median_or_zero(turns)


def _role_cpus(assignments: Mapping[int, Mapping[str, Any]], role: str) -> float | None:
    """Return the CPUs of a role's workers where models compute on CPUs; None on GPUs."""
    hosting = [assignment for assignment in assignments.values() if role in assignment["roles"]]
    return max(1.0, hosting[0]["cpus"]) if hosting and hosting[0]["device"] == "cpu" else None


def _rest_seconds(work: Sequence[Event], spans: Sequence[tuple[float, float]]) -> float:
    """Return the median seconds of an iteration outside its rollout and its update."""
    left = []
    for begin, end in spans:
        inside = [e for e in work if begin <= e["ts"] < end]
        covered, until = 0.0, begin
        for names in (ROLLOUT, ("update",)):
            part = [e for e in inside if e["name"] in names]
            first, last = min((e["ts"] for e in part), default=until), max(map(_event_end, part), default=until)
            covered, until = covered + max(0.0, last - max(first, until)), max(last, until)
        left.append(max(0.0, end - begin - covered) / 1e6)
    return _median_or_zero(left)


def _event_seconds(events: Iterable[Event]) -> tuple[float, ...]:
    return tuple(e["dur"] / 1e6 for e in events)


def _event_end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _event_lanes(event: Event) -> list[int]:
    lane = event["args"]["lane"]
    return lane if isinstance(lane, list) else [lane]


def _mean_or_zero(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _median_or_zero(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
