"""Interface between a run and the runtime that executes it. `vla_rl.runtime` implements it; tests may use another. The
loop talks to four parts of a runtime: rollouts, samples, learners and workers; and to parts of the training step that a
run can do without."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vla_rl.core.types import Array

if TYPE_CHECKING:
    from vla_rl.core.events import Evaluation
    from vla_rl.core.hookspecs import Algorithm
    from vla_rl.core.interrupts import Interrupts
    from vla_rl.core.run.flow import Ticket
    from vla_rl.core.spec.spec import Spec
    from vla_rl.core.types import Advantages, EnvInfo, Episode, Rollout

Scaling = Mapping[str, Mapping[str, Sequence[float]]] | None


class Rollouts(Protocol):
    """Episodes in the simulators: tickets become the rollout of a training step."""

    def issue(self, step: int, tickets: Sequence[Ticket]) -> None:
        """Have these tickets rolled out as envs become free; they were issued during `step`. Does not wait."""

    def wait(self, needed: Collection[int]) -> Sequence[int]:
        """Wait until some tickets are collected, preferably all needed ones. Return these, each once."""

    def assemble(self, step: int, tickets: Sequence[int]) -> tuple[Rollout, dict[str, float]]:
        """Assemble the rollout of these collected tickets. Return (trajectory record, metrics)."""


class Samples(Protocol):
    """Samples of a rollout, on their way to the learners."""

    def begin(self, step: int, tickets: Sequence[int]) -> None:
        """Let learners begin with these collected tickets, the first of all that the step consumes. Does not wait;
        `Learners.train` raises what went wrong. Does nothing without `asynchrony.streaming_update`."""

    def prepare(self, selected: Rollout, columns: Array) -> Rollout:
        """Return the rollout to train on: the columns (int64 [K]) of the last rollout, as cut in `selected`, after
        the replayed ones. Values and log-probs are recomputed with the newest weights if the algorithm needs that."""

    def release(self, trained: bool) -> dict[str, float]:
        """Free the samples of the last rollout; the training step is over. Return metrics."""


class Learners(Protocol):
    """The learners, and the weights that they publish."""

    def train(self, prepared: Rollout, advantages: Advantages) -> dict[str, float]:
        """Train on the rollout that was prepared last. Return metrics."""

    def publish(self, version: int, changed: bool = True) -> dict[str, float]:
        """Send the weights to the policies as this version (finished steps; `changed` since then). Return metrics."""

    def clone_expert(self) -> dict[str, float]:
        """Clone the simulator's scripted expert, as `bc_warmup:` says. Return metrics."""

    def open_imitation(self) -> Imitation:
        """Return the demonstrations of `imitation:`, ready for training."""

    def save(self, model_folder: Path, trainer_folder: Path) -> None:
        """Save the model in its public format, and the exact state to resume from."""

    def load(self, trainer_folder: Path) -> None:
        """Load the state that `save` wrote."""


class Workers(Protocol):
    """The processes of a run, wherever they run."""

    def listen(
        self,
        on_progress: Callable[[str, int, int], None],
        on_tick: Callable[[], None],
        on_fault: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Set the callbacks made during work.

        Args:
            on_progress: called with (phase, done, total). It may raise an exception to stop the work.
            on_tick: called from time to time.
            on_fault: called with a message about a fault that the run survived.
        """

    def evaluate(
        self, step: int, frames: int, enough: Callable[[Sequence[Episode], int], bool] | None = None
    ) -> Evaluation:
        """Evaluate every evaluation state once per repeat, and record camera frames of `frames` episodes. `enough`:
        asked after each round over all envs, in a fixed random order of the states, whether to end."""

    def describe_devices(self) -> str:
        """Describe the device of each role."""

    def progress(self, phase: str, done: int, total: int) -> tuple[str, int, int]:
        """Return the current activity and its (done, total), in the phase that `on_progress` was last called with."""

    def record(self, kind: str, step: int, env_steps: int, folder: Path, final: bool) -> None:
        """Collect busy and idle times of the workers since the last call, for the trace in `folder`."""

    def time_shares(self) -> dict[str, dict[str, Any]]:
        """Return each role's shares of its workers' time, for results.json."""

    def notes(self) -> tuple[str, ...]:
        """Return remarks on the results: of the simulator, the reward model and the compiler."""

    @property
    def faults(self) -> int:
        """Number of envs that broke and were replaced."""

    def close(self) -> None:
        """End all workers. May be called twice, also after an error."""


class TrainingPart(Protocol):
    """A part of the training step that a run can do without."""

    @property
    def name(self) -> str:
        """Key of its totals in results.json."""

    def follow_rollout(self, step: int) -> dict[str, float]:
        """Do the part's work after the rollout of a step, and before the samples are prepared. Return metrics."""

    def totals(self) -> dict[str, Any]:
        """Return totals over the run, as plain data."""


class Runtime(Protocol):
    """Simulators, policies and learners, wherever they run."""

    algorithm: Algorithm
    info: EnvInfo
    scaling: Scaling
    """Statistics that the model normalises by, if they came from demonstrations; else None."""

    @property
    def rollouts(self) -> Rollouts: ...

    @property
    def samples(self) -> Samples: ...

    @property
    def learners(self) -> Learners: ...

    @property
    def workers(self) -> Workers: ...

    @property
    def parts(self) -> Sequence[TrainingPart]: ...


class Imitation(Protocol):
    """Demonstrations stored with the learners, and optimiser steps on them."""

    metrics: dict[str, float]
    """Metrics of the demonstrations."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps in one pass over the demonstrations."""

    def batch_size(self, step: int) -> int:
        """Return the number of samples in an optimiser step (steps count from 1)."""

    def train(
        self, first: int, last: int, lr: Callable[[int], float], on_step: Callable[[int], None]
    ) -> dict[str, float]:
        """Run optimiser steps `first` to `last` (from 1, inclusive) at rates `lr`; `on_step` gets each; get metrics."""


class StartRuntime(Protocol):
    """Factory of a run's runtime."""

    def __call__(
        self,
        spec: Spec,
        *,
        imitation: bool = False,
        acts_only: bool = False,
        scaling: Scaling = None,
        folder: Path | None = None,
        interrupts: Interrupts,
    ) -> Runtime:
        """
        Args:
            imitation: the learners open the data that the spec's `imitation:` names.
            acts_only: the run only evaluates, so there are no learners.
            scaling: statistics the model normalises by, in a run that took them from its data; None: the model's own.
            folder: run folder, where trainers and parts of the training step keep data; None: no such parts.
            interrupts: signal handler; on its request a rollout or an evaluation ends with StopRequested."""
