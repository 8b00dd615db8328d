"""Evaluation by itself (`vla-rl eval`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl.core.interrupts import Interrupts, RunStopped, StopRequested
from vla_rl.core.runtime import StartRuntime
from vla_rl.core.spec.spec import Spec
from vla_rl.core.state import State, summary


def evaluate(spec: Spec, state: State, trainer: Path | None, start: StartRuntime) -> dict[str, Any]:
    """Evaluate a spec's model, with the weights of a checkpoint's trainer folder when one is given. Raises RunStopped
    after Ctrl-C or SIGTERM."""
    with Interrupts() as interrupts:
        try:
            return _evaluate(spec, state, trainer, start, interrupts)
        except StopRequested:
            raise RunStopped("stopped before all episodes were played") from None


def _evaluate(
    spec: Spec, state: State, trainer: Path | None, start: StartRuntime, interrupts: Interrupts
) -> dict[str, Any]:
    runtime = start(spec, scaling=state.scaling, interrupts=interrupts)
    try:
        if trainer is not None:
            runtime.load(trainer)
        result = summary(runtime.evaluate(state.step, 0))
        return result | {"faults": runtime.faults, "notes": list(runtime.info.notes)}
    finally:
        interrupts.closing = True
        runtime.close()
