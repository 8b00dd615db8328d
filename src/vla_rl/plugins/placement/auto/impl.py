"""The fastest of `plugins/placement/auto/choice.py` that fits."""

from __future__ import annotations

from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Cluster, DoesNotFit, Job, MeasureFirst, Plan
from vla_rl.plugins.placement.auto import AutoConfig
from vla_rl.plugins.placement.auto.choice import Choice, choices
from vla_rl.toolkit.placement.devices import Place, arrange, busy_devices


class Auto(Placement):
    def __init__(self, config: AutoConfig):
        self.config = config

    def plan(self, cluster: Cluster, job: Job) -> Plan:
        if job.measured is None:
            raise MeasureFirst(
                f"auto chooses by what a step of each role takes, and 0 of 3 are measured yet: a run does that first "
                f"({job.num_envs} rows on {cluster.cpus:g} CPUs and {cluster.gpus} GPUs)"
            )
        places = busy_devices(cluster)
        reasons = []
        for choice in choices(job.measured, job.num_envs, len(places)):
            try:
                return arrange(
                    cluster, job, _split(choice, places), stages=choice.stages, offload=self.config.offload.roles
                )
            except DoesNotFit as exc:
                reasons.append(str(exc))
        raise DoesNotFit(
            f"none of {len(reasons)} ways to place {job.num_envs} rows on {len(places)} devices fits; the fastest: "
            f"{reasons[0] if reasons else 'no number of workers divides the rows'}"
        )


def _split(choice: Choice, places: list[Place]) -> dict[str, list[Place]]:
    if choice.together:
        return dict.fromkeys(("sim", "policy", "learner"), places)
    acting = choice.sim + choice.policy
    return {
        "sim": places[: choice.sim],
        "policy": places[choice.sim : acting],
        "learner": places if choice.learner == len(places) else places[acting:],
    }
