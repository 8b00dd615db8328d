"""What a run asks of whatever carries it out. `vla_rl.runtime` is one; a test may bring another."""

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
    from vla_rl.core.types import Advantages, EnvInfo, Rollout

Scaling = Mapping[str, Mapping[str, Sequence[float]]] | None


class Runtime(Protocol):
    """Simulators, policies and learners, wherever they are."""

    algorithm: Algorithm
    info: EnvInfo
    version: int
    """Of the weights: training steps that are over."""
    scaling: Scaling
    """By which the model scales, where it took them from demonstrations."""
    faults: int
    """Simulator rows that broke and were replaced."""
    progress: Callable[[str, int, int], None]
    """Is called with (phase, done, total) while work goes on; may raise, to stop it."""
    on_fault: Callable[[str], None]
    """Is told of what broke and was survived."""
    tick: Callable[[], None]
    """Is called from time to time while work goes on."""

    @property
    def practice(self) -> dict[str, Any]:
        """Sums over the run of what `practise` did, plain data, and why it did not let the policy play."""

    def play(self, step: int, tickets: Sequence[Ticket]) -> None:
        """Have these played as rows become free; they were issued while `step` ran. Does not wait."""

    def finished(self, needed: Collection[int]) -> Sequence[int]:
        """Wait until tickets were played, best all that are needed. -> those that were, each once."""

    def rollout(self, step: int, tickets: Sequence[int]) -> tuple[Rollout, dict[str, float]]:
        """What came of these. -> (its light part, metrics)."""

    def feed(self, step: int, tickets: Sequence[int]) -> None:
        """These were played, first of all that the step consumes: with `asynchrony.stream` learners may begin with what
        the algorithm makes of them. Does not wait; what goes wrong, `update` raises."""

    def practise(self, step: int) -> dict[str, float]:
        """Fit the world model to what the last rollout brought, and let the policy play in it; what comes of that,
        `update` trains on beside what is prepared, each with advantages of its own. Nothing without a world model.
        -> metrics."""

    def prepare(self, kept: Rollout, keep: Array) -> Rollout:
        """What is trained on: the columns `keep` (int64 [K]) of the last rollout, which `kept` is cut to, behind those
        that are trained on again; with values and log-probs of the newest weights as the algorithm needs them."""

    def update(self, prepared: Rollout, advantages: Advantages) -> dict[str, float]:
        """Train on what was prepared last. -> metrics."""

    def finish(self, trained: bool) -> dict[str, float]:
        """The step of the last rollout is over: forget what it was made of, and publish the weights, or say that they
        are the same. -> metrics."""

    def evaluate(self, step: int, frames: int) -> Evaluation:
        """Every evaluation state once per repeat; of `frames` episodes pictures are recorded."""

    def warm_up(self) -> dict[str, float]:
        """Clone the simulator's scripted expert, as `warmup:` says. -> metrics."""

    def imitation(self) -> Imitation:
        """The demonstrations of `imitation:`, ready to train on."""

    def publish(self) -> None:
        """Give the policies the learners' weights."""

    def save(self, model_folder: Path, trainer_folder: Path) -> None:
        """The model in its public format, and the exact state to go on from."""

    def load(self, trainer_folder: Path) -> None:
        """What `save` wrote."""

    def devices(self) -> str:
        """What each role works on, in words."""

    def how_far(self, phase: str, done: int, total: int) -> tuple[str, int, int]:
        """What goes on, and (done, total) of it, in a phase of which `progress` was told these last."""

    def record(self, kind: str, step: int, env_steps: int, folder: Path, final: bool) -> None:
        """Take in who worked and who waited since the last time, for the trace in `folder`."""

    def roles(self) -> dict[str, dict[str, Any]]:
        """Role -> shares of its workers' time, for results.json."""

    def close(self) -> None:
        """End all workers; may be called twice, also after an error."""


class Imitation(Protocol):
    """Demonstrations that lie with the learners, and optimiser steps on them."""

    epoch: int
    """Optimiser steps of one pass over the demonstrations."""
    about: dict[str, float]
    """Metrics of the demonstrations."""

    def size(self, step: int) -> int:
        """Samples of an optimiser step (from 1)."""

    def train(self, first: int, last: int, rate: Callable[[int], float], progress: Callable[[int], None]) -> float:
        """Optimiser steps `first` to `last` (from 1, inclusive), the learning rate of each given by `rate`;
        `progress` is told the next. -> mean loss of a sample."""


class StartRuntime(Protocol):
    """How a run gets its runtime."""

    def __call__(
        self,
        spec: Spec,
        *,
        imitation: bool = False,
        scaling: Scaling = None,
        folder: Path | None = None,
        interrupts: Interrupts,
    ) -> Runtime:
        """
        Args:
            imitation: the learners open the data that the spec's `imitation:` names.
            scaling: by which the model scales, of a run that took them from its data; None: the model's own.
            folder: of the run, where a world model's episodes are kept; None: there is no practice.
            interrupts: by whose order a rollout or an evaluation is left, with StopRequested.
        """
