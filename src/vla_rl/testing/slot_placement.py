"""A placement for tests and benchmarks, `slots`: every role in separate workers, stages and window as given.

`spec.plugins: [vla_rl.testing.slot_placement]` makes it available.
"""

from __future__ import annotations

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.declarations import PlacementPlugin
from vla_rl.core.hookspecs import Placement
from vla_rl.core.plan import Batching, Cluster, Job, Plan, Slot


@frozen(kw_only=True)
class SlotsConfig:
    sim: int = field(default=1, validator=v.ge(1))
    """Workers that simulate."""
    policy: int = field(default=1, validator=v.ge(1))
    """Workers that act."""
    learner: int = field(default=1, validator=v.ge(1))
    """Workers that learn."""
    stages: int = field(default=1, validator=v.ge(1))
    """Lanes of each sim worker."""
    concurrent_lanes: bool = False
    """Lanes of a worker step at the same time."""
    max_batch: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Envs of an inference; none: all of a policy's envs, or one lane with stages in lock-step."""
    max_wait_s: float | None = field(default=None, validator=v.optional(v.ge(0)))
    """Seconds the oldest request waits for a fuller batch; none: as long as it takes."""
    cpus: float = field(default=0.1, validator=v.gt(0))
    """Ray CPUs of each worker."""


class Slots(Placement):
    """Needs nothing of the cluster: more workers than cores are fine for a test."""

    def __init__(self, config: SlotsConfig):
        self.config = config

    def plan(self, cluster: Cluster, job: Job) -> Plan:
        config = self.config
        roles = ["sim"] * config.sim + ["policy"] * config.policy + ["learner"] * config.learner
        return Plan(
            slots=tuple(Slot(roles=(role,), cpus=config.cpus) for role in roles),
            stages=config.stages,
            concurrent_lanes=config.concurrent_lanes,
            batching=Batching(max_batch=config.max_batch, max_wait_s=config.max_wait_s),
        )


vla_rl_plugins = {
    "placement": {
        "slots": PlacementPlugin(config=SlotsConfig, build=Slots, summary="test double: a worker for every role")
    }
}
