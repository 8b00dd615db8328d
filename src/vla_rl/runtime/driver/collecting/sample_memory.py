"""Size of the samples that learners hold, and whether they fit into host memory."""

from __future__ import annotations

from functools import cached_property

from vla_rl.core.plan import Plan
from vla_rl.core.run.shape import RunShape
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.comm.interfaces import HostInterface, LearnerInterface
from vla_rl.runtime.planning.memory import check_memory, trajectory_bytes


class SampleMemory:
    """Sizes of the model and of samples, which workers measure when first asked."""

    def __init__(self, fleet: Fleet, spec: Spec, plan: Plan, info: EnvInfo) -> None:
        shape = RunShape.from_spec(spec)
        self.fleet = fleet
        self.spec = spec
        self.plan = plan
        self.info = info
        self._unchecked = shape.has_overlap or shape.has_replay
        """True until the samples that learners may hold were compared with the available memory, where rollouts run
        ahead or are replayed.
        """

    @cached_property
    def sample_bytes(self) -> int:
        """Bytes of a chunk step's sample, as learners hold it."""
        return self.fleet.get(self.fleet.learners[0].call(LearnerInterface.sample_bytes))

    def check_samples_fit(self) -> None:
        """Raise UserError where the samples do not fit into memory. Checks once, before the first ticket."""
        if self._unchecked:
            check_memory(self.spec, self.plan, self.fleet.backend.cluster_resources(), self.info, self.sample_bytes)
            self._unchecked = False

    def measure_sizes(self) -> dict[str, float]:
        """Return the sizes of the model, and of the longest trajectory unless learners may be offloaded; named as in
        `planning.profile.Profile`.
        """
        fleet = self.fleet
        sizes = fleet.get(fleet.worker_of(fleet.policies[0]).call(HostInterface.model_size))
        if not self.plan.offload and fleet.learners:
            sizes = {**sizes, "trajectory_bytes": trajectory_bytes(self.spec, self.info, self.sample_bytes)}
        return sizes
