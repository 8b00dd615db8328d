"""Every installed placement strategy, planned and simulated for one job; none is carried out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from random import Random

import attrs
from attrs import evolve, frozen

from vla_rl.cli.planning.profile import Cost, Profile
from vla_rl.cli.planning.simulate import Forecast, forecast
from vla_rl.core.catalogue import installed, load
from vla_rl.core.errors import PluginError, UserError
from vla_rl.core.plan import Cluster, DoesNotFit, Measured
from vla_rl.core.spec.spec import Component, Spec
from vla_rl.core.spec.structure import Problems
from vla_rl.runtime.assignments import assign, plan_for

STAGES = "pipeline_stages"
TRIED_STAGES = (1, 2, 4)
DRAWS = 64
"""Of measured latencies, for a mean."""


@frozen(kw_only=True)
class Candidate:
    """A strategy: what to expect of it, or why it cannot be had."""

    name: str
    own: bool
    """The spec's."""
    placement: Component
    forecast: Forecast | None
    reason: str = ""


def compare(spec: Spec, cluster: Cluster, profile: Profile) -> list[Candidate]:
    """The spec's own placement, then the others by name, each with its defaults and 1, 2 and 4 pipeline stages."""
    found: list[Candidate] = []
    for name, own, placement in _placements(spec):
        there = evolve(spec, placement=placement)
        try:
            plan = plan_for(there, cluster, partial(_measured, profile))
            # the local backend has one process whatever the plan says; compare what Ray would do
            assignments = assign(plan, spec.env.num_envs, one_process=False)
            expected = forecast(
                plan,
                assignments,
                profile,
                rounds=spec.rollout.rounds(spec.env.num_envs),
                chunk=spec.rollout.chunk,
                row_memory=load("env", spec.env.type, spec.plugins).row_memory,
            )
        except (DoesNotFit, UserError) as exc:
            found.append(Candidate(name=name, own=own, placement=placement, forecast=None, reason=str(exc)))
        else:
            found.append(Candidate(name=name, own=own, placement=placement, forecast=expected))
    return found


def _measured(profile: Profile, spec: Spec, cluster: Cluster) -> Measured:
    """What a strategy that measures first would find, by the profile."""
    rows, draws = max(spec.env.num_envs // max(cluster.gpus, 1), 1), Random(0)
    lengths = profile.chunk_steps if isinstance(profile.chunk_steps, tuple) else (profile.chunk_steps,)
    chunk_steps = sum(lengths) / len(lengths)
    samples = spec.env.num_envs * spec.rollout.rounds(spec.env.num_envs) * chunk_steps

    def mean(cost: Cost, size: float) -> float:
        return sum(cost.draw(draws, size) for _ in range(DRAWS)) / DRAWS

    return Measured(
        rows=rows,
        sim=mean(profile.sim, rows / profile.sim.rows),
        policy=mean(profile.policy, rows / profile.policy.rows),
        learner=mean(profile.learner, profile.learner.rows) * rows / samples,
        chunk_steps=max(lengths),
    )


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The one with the highest throughput; of equals the first."""
    fit = [(c.forecast.throughput, c) for c in candidates if c.forecast is not None]
    return max(fit, key=lambda pair: pair[0])[1] if fit else None


def _placements(spec: Spec) -> Iterator[tuple[str, bool, Component]]:
    seen = [spec.placement]
    yield _name(spec.placement), True, spec.placement
    for name in sorted(installed("placement", spec.plugins)):
        try:
            config = load("placement", name, spec.plugins).config()
        except (PluginError, Problems, TypeError, ValueError):
            continue  # has settings without a default: only a spec can choose it
        staged = any(f.name == STAGES for f in attrs.fields(type(config)))
        for stages in TRIED_STAGES if staged else (None,):
            changed = config if stages is None else evolve(config, **{STAGES: stages})
            placement = Component(type=name, config=changed)
            if placement not in seen:
                seen.append(placement)
                yield _name(placement), False, placement


def _name(placement: Component) -> str:
    stages = getattr(placement.config, STAGES, None)
    return placement.type if stages is None else f"{placement.type}, {stages} stage{'s' * (stages > 1)}"
