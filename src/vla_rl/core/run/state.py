"""What a run remembers besides weights, and where it is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import attrs
from attrs import define, field

from vla_rl.core.events import Evaluation
from vla_rl.core.run.flow import Ledger
from vla_rl.core.spec.spec import Spec


def _ledger(kept: Ledger | dict[str, int]) -> Ledger:
    """Also from a checkpoint."""
    return kept if isinstance(kept, Ledger) else Ledger(**kept)


@define
class State:
    """What a run remembers besides weights. There is no generator state: randomness is keyed."""

    step: int = 0
    wall_seconds: float = 0.0
    env_steps: int = 0
    faults: int = 0
    """Simulator rows that broke and were replaced."""
    evaluated: int = -1
    """Last step that was evaluated."""
    before: dict[str, Any] | None = None
    """Result of the evaluation at step 0."""
    last: dict[str, Any] | None = None
    """Result of the last evaluation."""
    warmed_up: bool = False
    """The expert was cloned; a run that is stopped before that starts again."""
    doing: str = "training"
    """As in `Run`."""
    scaling: Mapping[str, Any] | None = None
    """By which the model scales, where it took them from demonstrations."""
    tickets: Ledger = field(factory=Ledger, converter=_ledger)
    """How those that were consumed ended."""
    practice: dict[str, Any] = field(factory=dict)
    """`Runtime.practice`: what was done in a world model."""
    reused: int = 0
    """Tickets that were trained on again, out of the replay buffer; each counts as often as that was."""
    refilled: int = 0
    """Times that the run went on with an empty replay buffer."""

    def remember(self, evaluation: Evaluation) -> None:
        self.evaluated, self.last = evaluation.step, summary(evaluation)
        if evaluation.step == 0:
            self.before = self.last


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as results.json has it."""
    mean = sum(evaluation.repeats) / max(len(evaluation.repeats), 1)
    spread = sum((r - mean) ** 2 for r in evaluation.repeats)
    count = len(evaluation.repeats)
    return {
        "step": evaluation.step,
        "success": attrs.asdict(evaluation.success),
        "tasks": {name: attrs.asdict(rate) for name, rate in evaluation.tasks.items()},
        "repeats": list(evaluation.repeats),
        "deviation": (spread / (count - 1)) ** 0.5 if count > 1 else None,
        "seconds": evaluation.seconds,
    }


class RunStore(Protocol):
    """Where a run keeps its state, checkpoints and results: `runtime/run_folder` is one."""

    path: Path

    def claim(self, resume: bool) -> AbstractContextManager[Any]:
        """Hold it for this process. Raises UserError where another one does, or nothing can be kept."""

    def begin(self, spec: Spec, doing: str, resume: bool) -> tuple[State, Path | None]:
        """What to start from: the state, and the trainer folder of its checkpoint if there is one. Raises UserError
        where there is a run already and `resume` is not asked for, or another one."""

    def record(self, spec: Spec, resumed: int | None = None) -> None:
        """Write down what trains, and where; `resumed`: from which step it goes on."""

    def latest(self) -> Path | None:
        """The newest checkpoint."""

    def save(self, state: State, write: Callable[[Path, Path], None], keep: int) -> Path:
        """Keep a checkpoint, which `write(model folder, trainer folder)` writes, and the `keep` newest. -> it."""

    def write_results(
        self, spec: Spec, state: State, notes: Sequence[str], doing: str, roles: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`notes`: what the simulator has to say of its settings; `roles`: as of `Runtime.roles`. -> results.json."""
