"""Plan of a spec: the slots of its workers, as the placement plugin makes them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from attrs import evolve

from vla_rl.core.catalogue import build, hook_modules, load
from vla_rl.core.errors import UserError, format_count
from vla_rl.core.hookspecs import Placement
from vla_rl.core.manager import wrap
from vla_rl.core.plan import Cluster, DoesNotFit, Job, MeasureFirst, Plan, Slot
from vla_rl.core.spec.spec import Spec, has_own_policy
from vla_rl.runtime.planning.forecast import compared_seconds
from vla_rl.runtime.planning.profile import Profile
from vla_rl.toolkit.placement.checks import validate_plan
from vla_rl.toolkit.waiting import register_work

WITHOUT = "leave runtime.require out to run on CPUs"


class NoCuda(UserError):
    """The requirement `runtime.require: cuda` is not met."""


def plan_for(
    spec: Spec,
    cluster: Cluster,
    measure: Callable[[Spec, Cluster], Profile] | None = None,
    *,
    acts_only: bool = False,
) -> Plan:
    """Ask the placement plugin for a plan. Simulators with a separate interpreter get separate slots; a run that only
    acts (an evaluation, or an engine with its own policy) has no learners. Raises DoesNotFit; MeasureFirst where the
    strategy plans by measured costs and there is no `measure`; NoCuda."""
    if spec.runtime.require == "cuda" and not cluster.gpus:
        raise NoCuda(
            f"cuda is required, and there is no GPU: {format_count(cluster.cpus, 'CPU')} and 0 GPUs were found; "
            f"{WITHOUT}"
        )
    component: Placement = build("placement", spec.placement.type, spec.placement.config, None, spec.plugins)
    placement: Placement = wrap("placement", component, spec.placement.type, hook_modules(spec.plugins))
    job = Job(
        num_envs=spec.env.num_envs,
        group_size=spec.rollout.group_size,
        env=spec.env.type,
        env_memory=load("env", spec.env.type, spec.plugins).env_memory,
        global_batch=spec.train.global_batch,
    )
    try:
        plan = placement.plan(cluster, job)
    except MeasureFirst as exc:
        if has_own_policy(spec):
            engine = spec.rollout.engine.type
            text = f"placement {spec.placement.type!r} measures training, and engine {engine!r} has its own policy"
            raise DoesNotFit(f"{text}; choose another placement") from exc
        if measure is None:
            raise
        steady = measure(spec, cluster).steady_profile
        with register_work("comparing plans", about=spec.placement.type) as note:
            tried = count(1)

            def forecast_plan(plan: Plan) -> float:
                note(next(tried))
                return compared_seconds(plan, spec, steady)

            plan = placement.plan(cluster, evolve(job, forecast=forecast_plan))
    plan = validate_plan(plan, cluster, job)
    if acts_only or has_own_policy(spec):  # no learners, and no slots that host nothing else; there is only one phase
        acting = [(slot, tuple(role for role in slot.roles if role != "learner")) for slot in plan.slots]
        slots = tuple(evolve(slot, roles=roles) for slot, roles in acting if roles)
        plan = evolve(plan, slots=slots, offload=frozenset())
    slow = [r for r in ("policy", "learner") if any(plan.slots[i].device == "cpu" for i in plan.hosting(r))]
    if spec.runtime.require == "cuda" and slow:
        raise NoCuda(f"cuda is required, and {' and '.join(slow)} would be on CPUs; change the placement, or {WITHOUT}")
    return plan if spec.env.python is None else _with_separate_sims(plan)


def _with_separate_sims(plan: Plan) -> Plan:
    """Return the plan with every sim role in a separate slot, which gets half of the shared slot: simulators that
    need another interpreter need other processes."""
    slots: list[Slot] = []
    for slot in plan.slots:
        others = tuple(role for role in slot.roles if role != "sim")
        if "sim" not in slot.roles or not others:
            slots.append(slot)
            continue
        half = evolve(slot, cpus=slot.cpus / 2, gpus=slot.gpus / 2)
        slots += [evolve(half, roles=("sim",)), evolve(half, roles=others)]
    return evolve(plan, slots=tuple(slots))
