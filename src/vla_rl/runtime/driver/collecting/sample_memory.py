"""Size of the samples that learners hold, and whether they fit into host memory."""

from __future__ import annotations

from functools import cached_property

from attrs import define

from vla_rl.core.plan import Plan
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import HostInterface, LearnerInterface
from vla_rl.runtime.planning.memory import check_memory, trajectory_bytes


@define(eq=False, slots=False)
class SampleMemory:
    """Sizes of the model and of samples, which workers measure when first asked."""

    fleet: Fleet
    spec: Spec
    plan: Plan
    info: EnvInfo
    _checked: bool = False

    @cached_property
    def sample_bytes(self) -> int:
        """Bytes of a chunk step's sample, as learners hold it."""
        return self.fleet.get(self.fleet.learners[0].call(LearnerInterface.sample_bytes))

    def check_samples_fit(self) -> None:
        """Raise UserError where the samples that learners may hold at once do not fit into memory, or those of a step
        have no room on their way there. Checks once, before the first ticket."""
        if not self._checked:
            check_memory(self.spec, self.plan, self.fleet.backend.cluster_resources(), self.info, self.sample_bytes)
            if self.fleet.remote_policies:
                tickets = RunShape.from_spec(self.spec).tickets_per_step
                self.fleet.backend.check_store(tickets * trajectory_bytes(self.spec, self.info, self.sample_bytes))
            self._checked = True

    def measure_sizes(self) -> dict[str, float]:
        """Return the sizes of the model and, with learners, of the longest trajectory; named as in
        `planning.profile.Profile`."""
        fleet = self.fleet
        sizes = fleet.get(fleet.worker_of(fleet.policies[0]).call(HostInterface.model_size))
        if fleet.learners:
            sizes = {**sizes, "trajectory_bytes": trajectory_bytes(self.spec, self.info, self.sample_bytes)}
        return sizes
