"""Every installed placement strategy, planned and simulated for one job; none is carried out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
from attrs import evolve, frozen

from vla_rl.core.catalogue import installed_plugins, load
from vla_rl.core.errors import PluginError, UserError
from vla_rl.core.plan import Cluster, DoesNotFit, Plan
from vla_rl.core.spec.spec import PlacementSpec, Spec
from vla_rl.core.spec.structure import Problems
from vla_rl.runtime.gpu_memory.checks import NOT_PREDICTED, Prediction
from vla_rl.runtime.placement.assignments import assign_workers
from vla_rl.runtime.planning.device_memory import DeviceMemory, check_capacity, device_memory
from vla_rl.runtime.planning.forecast import Forecast, Overlap, forecast_spec, has_dedicated_learners, overlap
from vla_rl.runtime.planning.plan import plan_for
from vla_rl.runtime.planning.profile import Profile
from vla_rl.toolkit.waiting import register_work

STAGES = "pipeline_stages"
TRIED_STAGES = (1, 2, 4)


@frozen(kw_only=True)
class Candidate:
    """A strategy: what to expect of it, or why it cannot be had."""

    name: str
    own: bool
    """The spec's."""
    placement: PlacementSpec
    plan: Plan | None = None
    forecast: Forecast | None = None
    gpus: Sequence[DeviceMemory] = ()
    """Memory that each GPU needs, fullest first; empty where it is not predicted."""
    reason: str = ""


def compare_placements(
    spec: Spec, cluster: Cluster, profile: Profile, prediction: Prediction = NOT_PREDICTED
) -> list[Candidate]:
    """The spec's own placement, then the others by name, each with its defaults and 1, 2 and 4 pipeline stages.
    `prediction`: memory of the spec's model."""
    listed = list(_list_placements(spec))
    candidates: list[Candidate] = []
    with register_work("planning", total=len(listed)) as note:
        for candidate in listed:
            note(len(candidates))
            candidates.append(_plan_candidate(spec, cluster, profile, prediction, candidate))
    return candidates


def _plan_candidate(
    spec: Spec, cluster: Cluster, profile: Profile, prediction: Prediction, candidate: Candidate
) -> Candidate:
    candidate_spec = evolve(spec, placement=candidate.placement)
    gpus: Sequence[DeviceMemory] = ()
    try:
        plan = plan_for(candidate_spec, cluster, lambda spec, cluster: profile)
        if (spec.asynchrony.max_lag or spec.asynchrony.streaming_update) and not has_dedicated_learners(plan):
            key = f"max_lag {spec.asynchrony.max_lag}" if spec.asynchrony.max_lag else "stream"
            raise DoesNotFit(
                f"asynchrony.{key} needs learners in separate workers, from which nothing is offloaded; leave "
                f"it out, or choose disaggregated"
            )
        forecast = forecast_spec(plan, candidate_spec, profile)
        if prediction.memory is not None:
            workers = assign_workers(plan, spec.env.num_envs, one_process=False)
            gpus = device_memory(plan, workers, prediction.memory, candidate_spec)
        if gpus:
            forecast = evolve(forecast, device_bytes=gpus[0].peak[0])
            check_capacity(gpus, cluster.gpu_memory)
    except (DoesNotFit, UserError) as exc:
        return evolve(candidate, reason=str(exc))
    return evolve(candidate, plan=plan, forecast=forecast, gpus=gpus)


def forecast_overlap(spec: Spec, candidates: Sequence[Candidate], profile: Profile) -> tuple[Candidate, Overlap] | None:
    """Forecast the gain from running ahead, under the spec's placement or else the fastest with dedicated learners."""
    able = [
        candidate for candidate in candidates if candidate.plan is not None and has_dedicated_learners(candidate.plan)
    ]
    chosen = next((candidate for candidate in able if candidate.own), None) or best_candidate(able)
    if chosen is None or chosen.plan is None:
        return None
    return chosen, overlap(chosen.plan, evolve(spec, placement=chosen.placement), profile)


def best_candidate(candidates: Sequence[Candidate]) -> Candidate | None:
    """The one with the highest throughput; of equals the first."""
    fit = [(c.forecast.throughput, c) for c in candidates if c.forecast is not None]
    return max(fit, key=lambda pair: pair[0])[1] if fit else None


def _list_placements(spec: Spec) -> Iterator[Candidate]:
    placements = [spec.placement]
    yield Candidate(name=_placement_name(spec.placement), own=True, placement=spec.placement)
    for name in sorted(installed_plugins("placement", spec.plugins)):
        try:
            config = load("placement", name, spec.plugins).config()
        except (PluginError, Problems, TypeError, ValueError):
            continue  # has settings without a default: only a spec can choose it
        staged = any(f.name == STAGES for f in attrs.fields(type(config)))
        for stages in TRIED_STAGES if staged else (None,):
            changed = config if stages is None else evolve(config, **{STAGES: stages})
            placement = evolve(spec.placement, type=name, config=changed)
            if placement not in placements:
                placements.append(placement)
                yield Candidate(name=_placement_name(placement), own=False, placement=placement)


def _placement_name(placement: PlacementSpec) -> str:
    stages = getattr(placement.config, STAGES, None)
    return placement.type if stages is None else f"{placement.type}, {stages} stage{'s' * (stages > 1)}"
