"""Evaluation by itself (`vla-rl eval`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl.core.interrupts import Interrupts, RunStopped, StopRequested
from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.driver import Runtime
from vla_rl.runtime.preflight import check_spec
from vla_rl.runtime.run_folder.folder import State, read_state, summary


def evaluate_only(spec: Spec, checkpoint: Path | None) -> dict[str, Any]:
    """Evaluate a spec's model, with the weights of a checkpoint folder of a run when one is given. Raises
    CheckpointError when any of its files is damaged, RunStopped after Ctrl-C or SIGTERM."""
    check_spec(spec, training=False)
    with Interrupts() as interrupts:
        try:
            return _evaluate(spec, checkpoint, interrupts)
        except StopRequested:
            raise RunStopped("stopped before all episodes were played") from None


def _evaluate(spec: Spec, checkpoint: Path | None, interrupts: Interrupts) -> dict[str, Any]:
    state = read_state(checkpoint) if checkpoint is not None else State()
    runtime = Runtime(spec, statistics=state.statistics, interrupts=interrupts)
    try:
        if checkpoint is not None:
            runtime.load(checkpoint / "trainer")
        result = summary(runtime.evaluate(state.step))
        return result | {"faults": runtime.faults, "notes": list(runtime.info.notes)}
    finally:
        interrupts.closing = True
        runtime.close()
