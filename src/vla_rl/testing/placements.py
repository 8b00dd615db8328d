"""`check_placement`: does a placement strategy keep to the contract of `Placement`?"""

from __future__ import annotations

from typing import Any

from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Cluster, DoesNotFit, Job, Plan
from vla_rl.core.types import Context, Plugin
from vla_rl.testing.findings import Findings, built
from vla_rl.toolkit.placement.checks import check_acts

GIB = 2**30
ROLES = ("sim", "policy", "learner")
CLUSTERS = (
    Cluster(cpus=8, gpus=0, memory=32 * GIB),
    Cluster(cpus=32, gpus=1, memory=128 * GIB),
    Cluster(cpus=96, gpus=8, memory=1024 * GIB),
)


def forecast(plan: Plan) -> float:
    """A made-up one: seconds of an iteration that its workers share."""
    return 10.0 / len(plan.slots)


JOB = Job(num_envs=64, group_size=4, env="scripted", row_memory=2**20, forecast=forecast)
ABSURD = Job(num_envs=10**9, group_size=1, env="scripted", row_memory=2**40, forecast=forecast)


def check_placement(
    placement: Placement | Plugin,
    config: Any = None,
    *,
    clusters: tuple[Cluster, ...] = CLUSTERS,
    job: Job = JOB,
) -> None:
    """Plan `job` on every cluster; it must fit on one of them at least. Raises CheckFailed with all findings.

    A plan hosts every role, uses no more than there is, has sane stages, window and lag, and is a pure function of
    its arguments. A job that fits nowhere (a thousand million simulators of a TiB) raises `DoesNotFit` with numbers.
    `config`: of the plugin, when a `Plugin` is given.
    """
    strategy: Placement
    strategy, name = built("placement", placement, config, Context())
    f = Findings(f"check_placement of {name}")
    refusals = []
    for cluster in clusters:
        with f.section(f"plan on {_name(cluster)}"):
            try:
                plan = strategy.plan(cluster, job)
            except DoesNotFit as exc:
                refusals.append(f"{_name(cluster)}: {exc}")
                continue
            _check_plan(f, plan, cluster, job)
            again = strategy.plan(cluster, job)
            f.expect(again == plan, "plan", "equal plans for equal arguments", "two different ones", "keep no state")
    f.expect(
        len(refusals) < len(clusters),
        "plan",
        f"a plan on one of {len(clusters)} clusters at least",
        "DoesNotFit on all: " + " | ".join(refusals),
        "pass `clusters` or `job` that the strategy is meant for, or place what fits",
    )
    with f.section("plan of an absurd job"):
        try:
            plan = strategy.plan(clusters[-1], ABSURD)
        except DoesNotFit as exc:
            has_number = any(character.isdigit() for character in str(exc))
            f.expect(has_number, "DoesNotFit", "a message with numbers", repr(str(exc)), "say what is needed and there")
        else:
            got = f"a plan of {len(plan.slots)} slots"
            f.expect(False, "plan", "DoesNotFit for 1,000 million rows of 1 TiB", got, "compare row_memory with memory")
    f.close()


def _name(cluster: Cluster) -> str:
    return f"{cluster.cpus:g} CPUs and {cluster.gpus} GPUs"


def _check_plan(f: Findings, plan: Plan, cluster: Cluster, job: Job) -> None:
    on = f"plan on {_name(cluster)}"
    if not f.expect(isinstance(plan, Plan), on, "a Plan", type(plan).__name__, "return vla_rl.core.plan.Plan"):
        return
    for role in ROLES:
        f.expect(bool(plan.hosting(role)), on, f"a slot for {role!r}", "none", "every role needs a place")
    for slot in plan.slots:
        unknown = set(slot.roles) - set(ROLES)
        f.expect(not unknown, on, f"roles among {ROLES}", sorted(unknown), "correct the name")
        f.expect(bool(slot.roles), on, "a role in every slot", "an idle slot", "leave it out")
        f.expect(slot.cpus >= 0 and slot.gpus >= 0, on, "cpus and gpus >= 0", slot, "correct the share")
        on_gpu = slot.device.startswith("cuda")
        same = on_gpu == (slot.gpus > 0)
        f.expect(same, on, "a share of a GPU exactly for device cuda", slot, "set gpus and device together")
    for what, used, there in (
        ("CPUs", sum(slot.cpus for slot in plan.slots), cluster.cpus),
        ("GPUs", sum(slot.gpus for slot in plan.slots), cluster.gpus),
    ):
        f.expect(used <= there + 1e-6, on, f"at most {there:g} {what}", f"{used:g}", "shares must add up")
    lanes = len(plan.hosting("sim")) * plan.stages
    f.expect(plan.stages >= 1, on, "stages >= 1", plan.stages, "one lane is the least")
    f.expect(lanes <= job.num_envs, on, f"at most {job.num_envs} lanes, a row each", lanes, "use fewer sim slots")
    window = plan.window
    f.expect(
        window.max_batch is None or window.max_batch >= 1, on, "max_batch None or >= 1", window, "None is all rows"
    )
    f.expect(window.max_wait is None or window.max_wait >= 0, on, "max_wait None or >= 0", window, "None: wait for all")
    try:
        check_acts(plan)
    except DoesNotFit as exc:
        f.expect(False, on, "a plan that can be carried out", str(exc), "leave it out")
    f.expect(plan.offload <= set(ROLES), on, f"offload among {ROLES}", sorted(plan.offload), "correct the name")
