"""Evaluation outside of training (`vla-rl eval`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import attrs

from vla_rl.core.catalogue import build
from vla_rl.core.errors import UserError, WorkerDied
from vla_rl.core.events import Run
from vla_rl.core.interrupts import Interrupts, StopRequested
from vla_rl.core.manager import broadcast, open_listeners
from vla_rl.core.paths import error_reason
from vla_rl.core.run.runtime import StartRuntime
from vla_rl.core.run.state import State, summarise_evaluation
from vla_rl.core.spec.spec import Spec, checkpoint_record
from vla_rl.runtime.driver.evaluation.evaluator import Enough

Progress = Callable[[str, int, int], None]
OnFault = Callable[[str], None]


class NotRecorded(UserError):
    """Error for episodes that were rolled out, but could not be recorded."""

    def __init__(self, result: dict[str, Any], cause: UserError | OSError) -> None:
        reason = error_reason(cause) if isinstance(cause, OSError) else str(cause)
        super().__init__(f"the episodes ran, but not recorded: {reason}")
        self.result = result
        """Result of the evaluation, as `evaluate` returns it."""

    def __reduce__(self) -> Any:
        return UserError, (str(self),)


def evaluate_checkpoint(
    spec: Spec,
    state: State,
    trainer: Path | None,
    start: StartRuntime,
    progress: Progress,
    on_fault: OnFault,
    enough: Enough | None = None,
) -> dict[str, Any]:
    """Evaluate a spec's model, with the weights of a checkpoint's trainer folder if one is given. `progress` is called
    now and then with the phase ("eval", or what it waits for), the number done and the total; `on_fault` with each
    fault that was survived. Raises RunStopped after Ctrl-C or SIGTERM."""
    with Interrupts() as interrupts:
        try:
            return _evaluate_model(spec, state, trainer, start, progress, on_fault, interrupts, enough)
        except StopRequested:
            raise interrupts.stop_error("stopped before all episodes ended") from None


def _evaluate_model(
    spec: Spec,
    state: State,
    trainer: Path | None,
    start: StartRuntime,
    progress: Progress,
    on_fault: OnFault,
    interrupts: Interrupts,
    enough: Enough | None,
) -> dict[str, Any]:
    hooks = [(h.type, build("hook", h.type, h.config, None, spec.plugins)) for h in spec.hooks]
    events = broadcast(hooks, interrupts.stop_because)
    runtime = start(spec, acts_only=True, scaling=state.scaling, interrupts=interrupts)
    current = "eval", 0, 0

    def on_progress(phase: str, done: int, total: int) -> None:
        nonlocal current
        current = phase, done, total
        progress(phase, done, total)

    workers = runtime.workers
    workers.listen(on_progress, lambda: progress(*workers.progress(*current)), on_fault)
    try:
        if trainer is not None:
            runtime.learners.load(trainer)
        run_info = Run(
            name=f"{spec.name} {uuid4().hex[:12]}",
            mode="evaluation",
            folder=Path() if trainer is None else trainer.parents[2],
            spec=spec.to_dict(),
            first_step=state.step,
            steps=state.step,
        )
        with open_listeners(events, run_info):
            interrupts.check_stop()
            evaluation = workers.evaluate(state.step, 0, enough)
            result = {
                **summarise_evaluation(evaluation),
                "faults": workers.faults,
                "notes": list(workers.notes()),
                "checkpoint": checkpoint_record(spec),
                "episodes": [attrs.asdict(episode) for episode in evaluation.episodes],
            }
            try:
                events.on_eval_end(run_info, state.step, evaluation)
                events.on_run_end(run_info, {})
            except WorkerDied as exc:  # which held recordings
                raise NotRecorded(result, exc) from exc
        if interrupts.reason is not None:  # a hook failed and asked for a stop
            cause = interrupts.reason.__cause__
            raise NotRecorded(result, cause if isinstance(cause, OSError) else interrupts.reason)
        return result
    finally:
        interrupts.closing = True
        workers.close()
