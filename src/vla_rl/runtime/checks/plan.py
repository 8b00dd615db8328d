"""Checks of a plan for which a run is refused: what its workers cannot do together with the settings of the spec."""

from __future__ import annotations

from collections.abc import Iterator

from vla_rl.core.errors import PluginError, SpecError
from vla_rl.core.plan import Cluster, DoesNotFit, MeasureFirst, Plan
from vla_rl.core.spec.source import Item, format_problems
from vla_rl.core.spec.spec import Spec, has_own_policy, trains_on_transitions
from vla_rl.runtime.checks.compilation import compilation_problem, role_of_model
from vla_rl.runtime.checks.imagination import world_model_placement_problems
from vla_rl.runtime.placement.weight_strategy import TransferNotPossible, planned_strategy
from vla_rl.toolkit.envs.settings import independent_envs
from vla_rl.toolkit.models.adapters import MERGE_PROBLEMS, frozen_storage, merge_mode


def plan_with_problems(spec: Spec, training: bool, cluster: Cluster) -> tuple[Plan | None, list[Item]]:
    """Return the plan, where it can be made without measuring, and its problems."""
    from vla_rl.runtime.planning.plan import NoCuda, plan_for

    try:
        plan = plan_for(spec, cluster)
        problems = list(_find_problems(spec, plan, cluster, training))
    except MeasureFirst:
        return None, []
    except NoCuda as exc:
        return None, [(("runtime", "require"), str(exc))]
    except (DoesNotFit, PluginError) as exc:
        return None, [(("placement",), str(exc))]
    return plan, problems


def compile_problems(spec: Spec, plan: Plan, learns: bool) -> list[Item]:
    """Return why models cannot be compiled in the workers of this plan, each reason once."""
    if has_own_policy(spec) or (spec.train.compile is None and spec.rollout.compile is None):
        return []
    problems: dict[Item, None] = {}
    moves = bool({"policy", "learner"} & set(plan.offload))
    for slot in plan.slots:
        roles = [role for role in slot.roles if role == "policy" or (learns and role == "learner")]
        problem = compilation_problem(spec, slot.device, role_of_model(roles), moves) if roles else None
        if problem is not None:
            problems[problem] = None
    return list(problems)


def check_plan(spec: Spec, plan: Plan, cluster: Cluster) -> None:
    """Raise SpecError if lanes or weight transfer cannot be as planned, or rollouts cannot run during training."""
    problems = list(_find_problems(spec, plan, cluster, training=True))
    if problems:
        raise SpecError(format_problems(problems, spec.source))


# ------------------------------------------------------------------------------------------------ internal


def _find_problems(spec: Spec, plan: Plan, cluster: Cluster, training: bool) -> Iterator[Item]:
    yield from _lane_problems(spec, plan)
    yield from _transfer_problems(spec, plan, cluster)
    yield from _merge_problems(spec, plan)
    yield from _fp8_problems(spec, plan)
    if training:
        yield from _learner_problems(spec, plan)
        yield from _asynchrony_problems(spec, plan)
        yield from world_model_placement_problems(spec, plan)


def _learner_problems(spec: Spec, plan: Plan) -> Iterator[Item]:
    learners = len(plan.hosting("learner"))
    if learners > 1 and spec.runtime.backend != "local" and trains_on_transitions(spec):
        text = (
            f"trainer {spec.trainer.type!r} keeps its transitions on one learner, and this plan has {learners}; use "
            f"placement: {{type: collocated, workers: 1}}, or disaggregated with learners: 1"
        )
        yield ("placement",), text
    if learners > 1 and spec.train.sharding == "full":
        from vla_rl.toolkit.trainers.parallel import sharding_problem

        problem = sharding_problem()
        if problem is not None:
            yield ("train", "sharding"), f"full {problem}"


def _lane_problems(spec: Spec, plan: Plan) -> Iterator[Item]:
    key = "lanes" if plan.concurrent_lanes else "batching"
    if not plan.concurrent_lanes and plan.batching.max_wait_s is None:
        return
    if spec.runtime.backend == "local":
        text = "one process does one thing after another (runtime.backend: local), so no env waits for another's step"
        yield ("placement", key), f"{text}; leave it out, or use runtime.backend: ray"
    elif plan.concurrent_lanes and not independent_envs(spec.env.config):
        text = (
            f"the envs of env {spec.env.type!r} step as one batch with these settings, and lanes of some of them would "
            f"split it; leave lanes out, or give the simulators more workers (placement.sim_workers)"
        )
        yield ("placement", "lanes"), text


def _transfer_problems(spec: Spec, plan: Plan, cluster: Cluster) -> Iterator[Item]:
    if spec.runtime.backend == "local":
        return
    here = spec.runtime.address is None
    try:
        planned_strategy(spec.placement.weight_transfer, plan, cluster, _has_nccl() if here else None)
    except TransferNotPossible as exc:
        yield ("placement", "weight_transfer"), str(exc)


def _has_nccl() -> bool:
    import torch

    return torch.distributed.is_nccl_available()


def _merge_problems(spec: Spec, plan: Plan) -> Iterator[Item]:
    """Yield why adapters cannot be merged for acting in the workers of this plan."""
    mode = merge_mode(spec.model.config)
    path = ("model", "lora", "merge_for_acting")
    if mode == "off" or has_own_policy(spec):
        return
    shared = any({"policy", "learner"} <= set(slot.roles) for slot in plan.slots)
    if shared and spec.train.sharding == "full":
        text = "policies act with the learners' shards (train.sharding: full), whose layers cannot be merged; use off"
        yield path, f"{text}, train.sharding: replicated, or `placement: {{type: disaggregated}}`"
    elif mode == "copy" and "policy" in plan.offload and not shared:
        text = "the second set of weights would stay on the device when the policy leaves it (placement.offload)"
        other = "off" if (frozen_storage(spec.model.config), "in_place") in MERGE_PROBLEMS else "in_place"
        yield path, f"{text}; use {other}, or leave the policy out of placement.offload"


def _fp8_problems(spec: Spec, plan: Plan) -> Iterator[Item]:
    """Yield why weights cannot be multiplied in FP8 in the workers of this plan; a worker on a GPU checks its own."""
    if has_own_policy(spec) or frozen_storage(spec.model.config) != "fp8":
        return
    import torch

    from vla_rl.toolkit.models.frozen_weights import find_fp8_problem

    devices = {slot.device for slot in plan.slots if {"policy", "learner"} & set(slot.roles)}
    for device in sorted(devices):
        problem = None if device.startswith("cuda") else find_fp8_problem(torch.device(device))
        if problem is not None:
            yield ("model", "frozen_weights"), problem


def _asynchrony_problems(spec: Spec, plan: Plan) -> Iterator[Item]:
    obstacle, local = "", spec.runtime.backend == "local"
    if local and spec.asynchrony.max_lag:
        obstacle = "one process does one thing after another (runtime.backend: local); use runtime.backend: ray"
    elif not local and any(plan.slots[index].roles != ("learner",) for index in plan.hosting("learner")):
        obstacle = "learners share workers with simulators or policies; use `placement: {type: disaggregated}`"
    elif plan.offload:
        obstacle = (
            f"{', '.join(sorted(plan.offload))} would leave the device between phases; leave out placement.offload"
        )
    if obstacle and spec.asynchrony.max_lag:
        text = f"rollouts cannot continue while learners train: {obstacle}, or asynchrony.max_lag: 0"
        yield ("asynchrony", "max_lag"), text
    elif obstacle and spec.asynchrony.streaming_update:
        text = (
            f"learners cannot begin while the rest of a step is collected: {obstacle}, or "
            "asynchrony.streaming_update: false"
        )
        yield ("asynchrony", "streaming_update"), text
