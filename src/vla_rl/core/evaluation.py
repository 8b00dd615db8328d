"""Evaluation by itself (`vla-rl eval`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl.core.runtime.driver import Runtime
from vla_rl.core.runtime.folder import State, read_state, summary
from vla_rl.core.runtime.preflight import check_spec
from vla_rl.core.spec import Spec


def evaluate_only(spec: Spec, checkpoint: Path | None) -> dict[str, Any]:
    """Evaluate a spec's model, with the weights of a checkpoint folder of a run when one is given."""
    check_spec(spec, training=False)
    state = read_state(checkpoint) if checkpoint is not None else State()
    runtime = Runtime(spec, statistics=state.statistics)
    try:
        if checkpoint is not None:
            runtime.load(checkpoint / "trainer")
        result = summary(runtime.evaluate(0))
        return result | {"faults": runtime.faults, "notes": list(runtime.info.notes)}
    finally:
        runtime.close()
