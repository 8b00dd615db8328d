"""The loop: roll out, let the algorithm judge the whole rollout, train, publish, evaluate, save.

Everything that happens in a run happens in `_iterate`, in reading order. The runtime hides where it happens.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import RunEvents
from vla_rl.core.plugins import build, hook_modules
from vla_rl.core.runtime.assemble import take_columns
from vla_rl.core.runtime.driver import Runtime
from vla_rl.core.runtime.folder import RunFolder, State, summary
from vla_rl.core.seats import broadcast
from vla_rl.core.spec import Spec
from vla_rl.core.types import Context, Run


class RunStopped(UserError):
    """Ctrl-C or SIGTERM: the run was saved and can be resumed."""

    exit_code = 130


class _StopRequested(Exception):
    """Unwinds a phase that has not changed the weights."""


def run(spec: Spec, folder: Path, resume: bool) -> dict[str, Any]:
    """Train as the spec says; -> the content of results.json.

    Raises RunStopped after Ctrl-C (a checkpoint was written), UserError for what the user can mend, and whatever a
    plugin raised, with the plugin's name. No process is left behind in any case.
    """
    home = RunFolder(folder)
    saved = home.restore() if resume else None
    with _interrupts() as interrupts:
        runtime = Runtime(spec)
        try:
            home.create(spec, resume)
            state = State()
            if saved is not None:
                state = saved[0]
                runtime.load(saved[1])
            events = listeners(spec)
            about = Run(
                name=spec.name, folder=folder, spec=spec.to_dict(), first_step=state.step, steps=spec.train.steps
            )

            def progress(phase: str, done: int, total: int) -> None:
                if interrupts:
                    raise _StopRequested
                events.on_progress(about, phase, done, total)

            runtime.progress = progress
            return _iterate(spec, runtime, home, state, events, about, interrupts, fresh=saved is None)
        finally:
            runtime.close()


def _iterate(
    spec: Spec,
    runtime: Runtime,
    home: RunFolder,
    state: State,
    events: RunEvents,
    about: Run,
    interrupts: list[int],
    fresh: bool,
) -> dict[str, Any]:
    started, algorithm = perf_counter() - state.wall_seconds, runtime.algorithm

    def save() -> None:
        state.wall_seconds = perf_counter() - started
        events.on_checkpoint(about, state.step, home.save(state, runtime.save, spec.train.keep_checkpoints))

    events.on_run_start(about)
    try:
        if fresh and spec.warmup is not None:
            events.on_update_end(about, 0, runtime.warm_up())
            save()
        while True:
            last = state.step >= spec.train.steps
            if evaluation_due(spec, state.step) and state.evaluated < state.step:
                evaluation = runtime.evaluate(state.step, events.frames_wanted(state.step))
                state.evaluated, state.last = state.step, summary(evaluation)
                state.before = state.before or (state.last if state.step == 0 else None)
                events.on_eval_end(about, state.step, evaluation)
            every = spec.train.checkpoint_every
            if state.step and (last or (every and state.step % every == 0)):
                save()
            if last:
                break
            step, begun = state.step + 1, perf_counter()

            events.on_progress(about, "rollout", step, spec.train.steps)
            rollout, metrics = runtime.rollout(step)
            rollout = algorithm.shape_rewards(rollout)
            events.on_rollout_end(about, step, rollout, metrics)
            if interrupts:
                raise _StopRequested
            keep = np.flatnonzero(algorithm.select(rollout).numpy())
            metrics["rollout/kept"] = len(keep) / rollout.valid.shape[1]
            kept = take_columns(rollout, keep)
            if len(keep):
                advantages = algorithm.advantages(kept)
                events.on_progress(about, "update", step, spec.train.steps)
                metrics |= advantages.metrics | runtime.update(kept, keep, advantages)
                events.on_weights_published(about, step, runtime.version)
            else:
                metrics["update/skipped"] = 1.0

            state.step = step
            state.env_steps += int(metrics["rollout/env_steps"])
            metrics["time/step"] = perf_counter() - begun
            metrics["throughput/env_steps_per_s"] = metrics["rollout/env_steps"] / metrics["time/step"]
            events.on_update_end(about, step, metrics)
            if interrupts:
                raise _StopRequested
    except _StopRequested:
        save()
        raise RunStopped(
            f"stopped after step {state.step} of {spec.train.steps}; saved in {home.path}, go on with --resume"
        ) from None
    state.wall_seconds = perf_counter() - started
    results = home.write_results(spec, state)
    events.on_run_end(about, results)
    return results


def evaluation_due(spec: Spec, step: int) -> bool:
    """Before training, every `eval.every` steps, and at the end."""
    if step == 0:
        return spec.eval.before or spec.train.steps == 0
    return step >= spec.train.steps or bool(spec.eval.every and step % spec.eval.every == 0)


def evaluate_only(spec: Spec, checkpoint: Path | None) -> dict[str, Any]:
    """Evaluate a spec's model, with the weights of a checkpoint folder of a run when one is given."""
    with _interrupts():
        runtime = Runtime(spec)
        try:
            if checkpoint is not None:
                runtime.load(checkpoint / "trainer")
            return summary(runtime.evaluate(0))
        finally:
            runtime.close()


def listeners(spec: Spec) -> RunEvents:
    """All run-event plugins of the spec, and the modules of `plugins:`."""
    built = [(h.type, build("hook", h.type, h.config, Context(seed=spec.seed), spec.plugins)) for h in spec.hooks]
    return broadcast([*built, *hook_modules(spec.plugins)])


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM is noted, so that a phase can end and be saved; the second one interrupts at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        print("\nstopping: saving after this phase; once more to stop at once", flush=True)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
