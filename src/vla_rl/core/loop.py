"""The loop: roll out, let the algorithm judge the whole rollout, train, evaluate, save. `_train_step` is one iteration,
in reading order; where it happens (one process, Ray workers, which devices) is hidden by the runtime."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from attrs import define

from vla_rl.core.evaluation import evaluation_due
from vla_rl.core.events import Run, listeners
from vla_rl.core.hookspecs import RunEvents
from vla_rl.core.runtime.assemble import take_columns
from vla_rl.core.runtime.driver import Runtime
from vla_rl.core.runtime.folder import RunFolder, State
from vla_rl.core.runtime.interrupts import Interrupts, RunStopped, StopRequested
from vla_rl.core.spec import Spec


def run(spec: Spec, folder: Path, resume: bool) -> dict[str, Any]:
    """Train as the spec says; -> the content of results.json. No process is left behind in any case. Raises RunStopped
    after Ctrl-C (saved), UserError for what the user can mend, and what a plugin raised."""
    home = RunFolder(folder)
    saved = home.restore() if resume else None
    with Interrupts() as interrupts:
        runtime = Runtime(spec)
        try:
            home.create(spec, resume)
            state = saved[0] if saved else State()
            if saved:
                runtime.load(saved[1])
            about = Run(
                name=spec.name, folder=folder, spec=spec.to_dict(), first_step=state.step, steps=spec.train.steps
            )
            return _Loop(spec, runtime, home, state, listeners(spec), about, interrupts).train()
        finally:
            runtime.close()


@define
class _Loop:
    spec: Spec
    runtime: Runtime
    home: RunFolder
    state: State
    events: RunEvents
    about: Run
    interrupts: Interrupts

    def train(self) -> dict[str, Any]:
        spec, state, begun = self.spec, self.state, perf_counter() - self.state.wall_seconds
        self.runtime.progress, self.runtime.on_fault = self._progress, self._fault
        self.events.on_run_start(self.about)
        try:
            if spec.warmup is not None and not state.warmed_up:
                self.events.on_update_end(self.about, 0, self.runtime.warm_up())
                state.warmed_up = True
                self._save(begun)
            while True:
                finished = state.step >= spec.train.steps
                if evaluation_due(spec, state.step) and state.evaluated < state.step:
                    self._evaluate()
                if state.step and (finished or state.step % (spec.train.checkpoint_every or spec.train.steps) == 0):
                    self._save(begun)
                if finished:
                    break
                self._train_step(state.step + 1)
        except StopRequested:
            if spec.warmup is not None and not state.warmed_up:
                raise RunStopped("stopped in the warm-up, before there was anything to save") from None
            self._save(begun)
            done = f"stopped after step {state.step}; saved in {self.home.path}, go on with --resume"
            raise RunStopped(done) from None
        state.wall_seconds = perf_counter() - begun
        results = self.home.write_results(spec, state, self.runtime.info.notes)
        self.events.on_run_end(self.about, results)
        return results

    def _train_step(self, step: int) -> None:
        begun, algorithm = perf_counter(), self.runtime.algorithm
        self._progress("rollout")
        rollout, metrics = self.runtime.rollout(step)
        rollout = algorithm.shape_rewards(rollout)
        self.events.on_rollout_end(self.about, step, rollout, metrics)
        self._progress("update")
        keep = np.flatnonzero(algorithm.select(rollout).numpy())
        metrics["rollout/kept"] = len(keep) / rollout.valid.shape[1]
        if len(keep):
            kept = take_columns(rollout, keep)
            advantages = algorithm.advantages(kept)
            metrics |= {**advantages.metrics, **self.runtime.update(kept, keep, advantages)}
            self.events.on_weights_published(self.about, step, self.runtime.version)
        else:
            metrics["update/skipped"] = 1.0
        self.state.step = step
        self.state.env_steps += int(metrics["rollout/env_steps"])
        metrics["time/step"] = seconds = perf_counter() - begun
        metrics["throughput/env_steps_per_s"] = metrics["rollout/env_steps"] / seconds
        self.events.on_update_end(self.about, step, metrics)

    def _evaluate(self) -> None:
        evaluation = self.runtime.evaluate(self.state.step, self.events.frames_wanted(self.state.step))
        self.state.remember(evaluation)
        self.events.on_eval_end(self.about, self.state.step, evaluation)

    def _save(self, begun: float) -> None:
        self.state.wall_seconds = perf_counter() - begun
        saved = self.home.save(self.state, self.runtime.save, self.spec.train.keep_checkpoints)
        self.events.on_checkpoint(self.about, self.state.step, saved)

    def _progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        self.interrupts.check()
        self.events.on_progress(self.about, phase, done, total)

    def _fault(self, text: str) -> None:
        self.state.faults += 1
        self.events.on_fault(self.about, self.state.step + 1, text)
