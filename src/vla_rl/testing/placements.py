"""`check_placement`: does a placement strategy keep to the contract of `Placement`?"""

from __future__ import annotations

from typing import Any

import attrs

from vla_rl.core.declarations import PlacementPlugin
from vla_rl.core.errors import format_count
from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Cluster, DoesNotFit, Job, Node, Plan
from vla_rl.testing.common.findings import Findings, build_component
from vla_rl.toolkit.placement.checks import ROLES, validate_plan

GIB = 2**30
CLUSTERS = (
    Cluster(cpus=8, gpus=0, memory=32 * GIB),
    Cluster(cpus=32, gpus=1, memory=128 * GIB),
    Cluster(cpus=96, gpus=8, memory=1024 * GIB),
)


def forecast_seconds(plan: Plan) -> float:
    """Synthetic seconds of an iteration that its workers share."""
    return 10.0 / len(plan.slots)


RACK = Cluster(
    cpus=96,
    gpus=6,
    memory=768 * GIB,
    nodes=(
        Node(name="box-a", cpus=32, gpus=4, memory=256 * GIB),
        Node(name="box-b", cpus=64, gpus=2, memory=512 * GIB),
    ),
)
"""Unlike machines, for strategies that say which one a worker is on."""
JOB = Job(num_envs=64, group_size=4, env="scripted", env_memory=2**20, forecast=forecast_seconds)
ABSURD = Job(num_envs=10**9, group_size=1, env="scripted", env_memory=2**40, forecast=forecast_seconds)


def check_placement(
    placement: Placement | PlacementPlugin,
    config: Any = None,
    *,
    clusters: tuple[Cluster, ...] = CLUSTERS,
    job: Job = JOB,
) -> None:
    """Plan `job` on every cluster; it must fit on one of them at least. Raises CheckFailed with all findings.

    A plan has sane stages and window, passes what the runtime checks before a run: every role has a place, and no more
    is used than there is (`vla_rl.toolkit.placement.checks.validate_plan`). It is a pure function of its arguments. So
    are plans of other numbers of simulators, batches and machines, where they are not refused with `DoesNotFit`. A job
    that fits nowhere (a thousand million simulators of a TiB) raises `DoesNotFit` with numbers.
    `config`: of the plugin, when a `PlacementPlugin` is given.
    """
    strategy: Placement
    strategy, name = build_component("placement", placement, config, None)
    f = Findings(f"check_placement of {name}")
    refusals, plans = [], []
    for cluster in clusters:
        with f.section(f"plan on {_cluster_name(cluster)}"):
            try:
                plan = strategy.plan(cluster, job)
            except DoesNotFit as exc:
                refusals.append(f"{_cluster_name(cluster)}: {exc}")
                continue
            _check_plan(f, plan, cluster, job)
            plans.append((cluster, plan))
    with f.section("plan again"):
        for cluster, plan in reversed(plans):
            again = strategy.plan(attrs.evolve(cluster), attrs.evolve(job))
            f.expect(again == plan, "plan", "equal plans for equal arguments", "two different ones", "keep no state")
    _check_variants(f, strategy, clusters, job)
    expected, got = f"a plan on one of {len(clusters)} clusters at least", "DoesNotFit on all: " + " | ".join(refusals)
    remedy = "pass `clusters` or `job` that the strategy is meant for, or place what fits"
    f.expect(len(refusals) < len(clusters), "plan", expected, got, remedy)
    with f.section("plan of an absurd job"):
        try:
            plan = strategy.plan(clusters[-1], ABSURD)
        except DoesNotFit as exc:
            has_number = any(character.isdigit() for character in str(exc))
            f.expect(has_number, "DoesNotFit", "a message with numbers", repr(str(exc)), "say what is needed and there")
        else:
            got = f"a plan of {len(plan.slots)} slots"
            f.expect(False, "plan", "DoesNotFit for 1,000 million envs of 1 TiB", got, "compare env_memory with memory")
    f.close()


def _cluster_name(cluster: Cluster) -> str:
    return f"{format_count(cluster.cpus, 'CPU')} and {format_count(cluster.gpus, 'GPU')}"


def _check_plan(f: Findings, plan: Plan, cluster: Cluster, job: Job) -> None:
    on = f"plan on {_cluster_name(cluster)}"
    if not f.expect(isinstance(plan, Plan), on, "a Plan", type(plan).__name__, "return vla_rl.core.plan.Plan"):
        return
    batch, wait = plan.batching.max_batch, plan.batching.max_wait_s
    f.expect(batch is None or batch >= 1, on, "max_batch None or >= 1", plan.batching, "None is all envs")
    f.expect(wait is None or wait >= 0, on, "max_wait_s None or >= 0", plan.batching, "None: wait for all")
    f.expect(plan.offload <= set(ROLES), on, f"offload among {ROLES}", sorted(plan.offload), "correct the name")
    if f.expect(plan.stages >= 1, on, "stages >= 1", plan.stages, "one lane is the least"):
        remedy = "plan what the runtime can carry out, or raise DoesNotFit"
        _check_feasible(f, (plan, cluster, job), on, "a plan that can be carried out", remedy)


def _check_feasible(f: Findings, planned: tuple[Plan, Cluster, Job], where: str, expected: str, remedy: str) -> None:
    try:
        validate_plan(*planned)
    except DoesNotFit as exc:
        f.expect(False, where, expected, str(exc), remedy)


def _check_variants(f: Findings, strategy: Placement, clusters: tuple[Cluster, ...], job: Job) -> None:
    """Other jobs and machines: what is not refused can be carried out."""
    jobs = {
        **{f"{envs} envs": attrs.evolve(job, num_envs=envs) for envs in (1, 6, 7, 48, 100)},
        "a global batch of 30": attrs.evolve(job, global_batch=30),
        "envs that fill half of the memory": attrs.evolve(job, env_memory=clusters[-1].memory // (2 * job.num_envs)),
        "no measurement": attrs.evolve(job, forecast=None),
    }
    for what, other in jobs.items():
        for cluster in clusters:
            with f.section(f"plan of {what}"):
                _check_variant(f, strategy, cluster, other, f"plan of {what} on {_cluster_name(cluster)}")
    with f.section("plan on two machines"):
        _check_variant(f, strategy, RACK, job, "plan on machines of 32 and 64 CPUs, 4 and 2 GPUs")


def _check_variant(f: Findings, strategy: Placement, cluster: Cluster, job: Job, where: str) -> None:
    try:
        plan = strategy.plan(cluster, job)
    except DoesNotFit:  # MeasureFirst is one
        return
    if len(cluster.nodes) > 1 and all(slot.node is None for slot in plan.slots):
        return  # a strategy for one machine
    expected = "DoesNotFit, or a plan that can be carried out"
    remedy = "raise DoesNotFit with what is needed and there, or place what fits"
    _check_feasible(f, (plan, cluster, job), where, expected, remedy)
