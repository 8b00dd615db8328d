"""Parts of the training step that a run can do without, and the roles that they add to workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, EnvInfo
from vla_rl.runtime.comm.handles import Fleet
from vla_rl.runtime.driver.collecting.assembler import RolloutBatch
from vla_rl.runtime.driver.collecting.rollouts import StepRollouts
from vla_rl.runtime.driver.reports.faults import FaultLog
from vla_rl.runtime.driver.reports.trace import Trace
from vla_rl.runtime.driver.samples.sample_router import SampleRouter
from vla_rl.runtime.messages.added_roles import AddedRoles


@frozen(kw_only=True)
class StepContext:
    """What a part of the training step works with, once the workers have started."""

    fleet: Fleet
    algorithm: Algorithm
    info: EnvInfo
    rollouts: StepRollouts
    router: SampleRouter
    fault_log: FaultLog
    trace: Trace
    on_progress: Callable[[str, int, int], None]


class StepPart(ABC):
    """A part of the training step (`core.run.runtime.TrainingPart`), called at named points of the loop. It is created
    before the workers, to which it may add roles, and connected once they have started."""

    name: str
    """Key of its totals in results.json."""
    acts: ClassVar[bool] = False
    """True if the policies act in envs that it adds, while they act in the simulators."""
    batch: RolloutBatch | None = None
    """Rollout that it collected in the running step, whose samples are freed at the step's end; None: none."""

    def added_roles(self, worker: int, lanes: dict[int, int]) -> AddedRoles | None:
        """Return what to build in a worker with simulators; None: nothing.

        Args:
            worker: number of the worker among those with simulators.
            lanes: lane -> its number of envs, of the whole run.
        """
        return None

    @abstractmethod
    def connect_to_run(self, context: StepContext) -> None:
        """Take what the part works with. Raises UserError for a run that it does not suit."""

    @abstractmethod
    def follow_rollout(self, step: int) -> dict[str, float]:
        """Do the part's work after the rollout of a step, and before its samples are prepared. Return metrics."""

    def add_samples(self, samples: RolloutBatch, advantages: Advantages) -> tuple[RolloutBatch, Advantages]:
        """Return what is trained on: these samples and, before them, what the part adds."""
        return samples, advantages

    @abstractmethod
    def finish_step(self, trained: bool) -> None:
        """End the step. `trained`: False where it had nothing to train on."""

    @abstractmethod
    def totals(self) -> dict[str, Any]:
        """Return totals over the run, as plain data."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the part's state to a checkpoint's trainer folder."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
