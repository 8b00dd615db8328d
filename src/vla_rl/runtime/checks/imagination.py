"""Checks of a run with a world model, before it starts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vla_rl.core.errors import SpecError
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.plan import Plan
from vla_rl.core.spec.source import Item, format_problems
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo

WHOLE = "a world model sees whole episodes"


def imagination_problems(algorithm: Algorithm, spec: Spec) -> Iterator[Item]:
    """Yield what is wrong in the spec alone."""
    section, rollout, asynchrony = spec.imagination, spec.rollout, spec.asynchrony
    if section is None:
        return
    if rollout.auto_reset is not None:
        yield ("rollout", "auto_reset"), f"{WHOLE}, each a ticket: it needs rollout.episodes, not auto_reset"
    if rollout.ignore_terminations:
        yield ("rollout", "ignore_terminations"), f"{WHOLE} with their ends; set it to false, or remove imagination"
    if asynchrony.replay is not None:
        yield ("asynchrony", "replay"), "imagined trajectories are trained on once; leave it out, or remove imagination"
    if asynchrony.streaming_update:
        text = (
            "learners cannot begin before the policy has trained in imagination; use streaming_update: false, or "
            "remove imagination"
        )
        yield ("asynchrony", "streaming_update"), text
    if spec.env.python is not None:
        text = "the world model lives with the simulators, and needs this interpreter's packages; remove it"
        yield ("env", "python"), text
    if algorithm.needs.frames:
        text = (
            f"algorithm {spec.algorithm.type!r} looks at the frames of whole trajectories, and imagined ones are never "
            "collected; choose another algorithm, such as grpo or ppo"
        )
        yield ("algorithm",), text
    if not algorithm.needs.values and section.start != "first":
        yield ("imagination", "start"), f"{_no_critic(spec)}; use start: first, or an algorithm with a critic, as ppo"
    if not algorithm.needs.values and rollout.max_steps is not None:
        yield from _horizon_problems(spec, rollout.max_steps)


def world_model_placement_problems(spec: Spec, plan: Plan) -> Iterator[Item]:
    """Yield what is wrong with the placement of the roles."""
    if spec.imagination is None:
        return
    one = "the world model lives with the first simulators, and there is one of it"
    if plan.concurrent_lanes:
        yield ("placement", "lanes"), f"{one}, so lanes cannot step at the same time; leave lanes out"
    if "sim" in plan.offload:
        yield ("placement", "offload"), f"{one}: it cannot leave the device; leave out placement.offload.sim"


def check_episodes(spec: Spec, algorithm: Algorithm, info: EnvInfo) -> None:
    """Raise SpecError where imagined episodes would be cut off. The driver, who knows their length, asks."""
    limit = spec.rollout.max_steps or max(task.max_steps for task in info.tasks)
    problems = [] if algorithm.needs.values else list(_horizon_problems(spec, limit))
    if problems:
        raise SpecError(format_problems(problems, spec.source))


def _horizon_problems(spec: Spec, limit: int) -> Iterator[Item]:
    assert spec.imagination is not None
    chunks, horizon = math.ceil(limit / spec.rollout.chunk), spec.imagination.horizon
    if horizon < chunks:
        text = (
            f"{_no_critic(spec)}: {horizon} chunks end before an episode of {chunks} does; give at least {chunks}, or "
            "an algorithm with a critic, as ppo"
        )
        yield ("imagination", "horizon"), text


def _no_critic(spec: Spec) -> str:
    return f"algorithm {spec.algorithm.type!r} has no critic that values what follows an imagined trajectory's end"
