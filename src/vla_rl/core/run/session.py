"""Common parts of all ways of training: the run folder, listeners, evaluations, checkpoints, resume and a clean stop.
`core/run/loop.py` trains by reinforcement learning, `core/run/imitation.py` by behaviour cloning."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

from attrs import Factory, define, field

from vla_rl.core.catalogue import build, hook_modules
from vla_rl.core.errors import CheckpointError, HookFailed, RunFolderGone, StopAndSave, UserError, WorkerDied
from vla_rl.core.events import Run
from vla_rl.core.hookspecs import RunEvents
from vla_rl.core.installation import console_command, quote_path
from vla_rl.core.interrupts import Interrupts, RunStopped, StopRequested
from vla_rl.core.manager import broadcast, open_listeners
from vla_rl.core.run.runtime import Runtime, StartRuntime
from vla_rl.core.run.state import RunStore, State
from vla_rl.core.run.weight_changes import WeightChangeMonitor
from vla_rl.core.spec.spec import Spec

logger = logging.getLogger(__name__)
NOTHING = "stopped before there was anything to save"


@define
class Session(ABC):
    """One attempt at a run. A subclass defines its steps: rollouts with their updates, or optimiser steps."""

    spec: Spec
    runtime: Runtime
    run_store: RunStore
    state: State
    events: RunEvents
    run_info: Run
    interrupts: Interrupts
    _start_time: float = field(factory=perf_counter, init=False)
    _saved: tuple[int, int] | None = field(default=None, init=False)
    """(step, last evaluated step) of the last checkpoint in this attempt that listeners heard of."""
    _written: int | None = field(default=None, init=False)
    """Step of the last checkpoint in this attempt."""
    _untraced: bool = field(default=False, init=False)
    """A warning that the trace cannot be written has been logged."""
    _phase: tuple[str, int, int] = field(default=("starting", 0, 0), init=False)
    weight_change_monitor: WeightChangeMonitor = field(
        init=False, default=Factory(lambda self: WeightChangeMonitor(self.spec), takes_self=True)
    )

    mode: ClassVar[str]  # for `Run.mode`

    @staticmethod
    @abstractmethod
    def last_step(spec: Spec) -> int:
        """Return the last step."""

    @classmethod
    def start_runtime(
        cls, spec: Spec, state: State, start: StartRuntime, folder: Path, interrupts: Interrupts
    ) -> Runtime:
        """Start the runtime of the run in this folder."""
        return start(spec, scaling=state.scaling, folder=folder, interrupts=interrupts)

    @abstractmethod
    def run_loop(self) -> None:
        """Train to the end. Calls `pass_milestone` before each advance of `state.step`, and once after the last."""

    @abstractmethod
    def eval_and_save_due(self) -> tuple[bool, bool]:
        """Return whether to evaluate and whether to save at `state.step`. The last step always does both."""

    @classmethod
    def run_attempts(cls, spec: Spec, run_store: RunStore, resume: bool, start: StartRuntime) -> dict[str, Any]:
        """Train to the end and return the content of results.json. No process is left behind in any case. Raise
        RunStopped after Ctrl-C or SIGTERM (saved), HookFailed if a listener raised (saved as well), UserError for what
        the user can fix, and a plugin's exceptions as they are. If a worker dies, the run resumes from its last
        checkpoint, or starts over if there is none and its workers had started, up to `runtime.restarts` times.
        Meanwhile no other process can run in the folder."""
        started = False
        interrupts = Interrupts()
        with run_store.claim_storage(resume, interrupts.stop_because), interrupts:
            for left in range(spec.runtime.restarts, -1, -1):
                state, trainer = run_store.begin_run(spec, cls.mode, resume)
                try:
                    with cls._start_attempt(spec, run_store, state, trainer, resume, start, interrupts) as session:
                        started = True
                        return session.train_to_end()
                except StopRequested:
                    raise interrupts.stop_error(cls._resume_advice(run_store) or NOTHING) from None
                except KeyboardInterrupt:
                    raise RunStopped(
                        f"stopped at once; {cls._resume_advice(run_store) or 'nothing was saved'}"
                    ) from None
                except WorkerDied as exc:
                    latest = run_store.latest_checkpoint()
                    if not left or not (latest or started):
                        cls._note_resume(exc, run_store)
                        raise
                    where = "continuing from the last checkpoint in" if latest else "starting over in"
                    logger.warning("%s\n  %s %s", str(exc).splitlines()[0], where, run_store.path)
                    resume = True
                except CheckpointError:  # its message says what to do
                    raise
                except Exception as exc:
                    cls._note_resume(exc, run_store)
                    raise
        raise AssertionError("the last attempt returns or raises")

    @classmethod
    @contextmanager
    def _start_attempt(
        cls,
        spec: Spec,
        run_store: RunStore,
        state: State,
        trainer: Path | None,
        resume: bool,
        start: StartRuntime,
        interrupts: Interrupts,
    ) -> Iterator[Session]:
        """Start the workers of an attempt, which end with the context."""
        interrupts.begin_attempt()
        runtime = cls.start_runtime(spec, state, start, run_store.path, interrupts)
        try:
            if trainer is not None:
                state = cls._load_checkpoint(runtime, run_store, state, trainer)
            if resume:
                run_store.record_training(spec, state.step)
            run_info = Run(
                name=spec.name,
                mode=cls.mode,
                folder=run_store.path,
                spec=spec.to_dict(),
                first_step=state.step,
                steps=cls.last_step(spec),
                devices=runtime.workers.describe_devices(),
            )
            events = build_listeners(spec, interrupts.stop_because)
            yield cls(spec, runtime, run_store, state, events, run_info, interrupts)
        finally:
            interrupts.closing = True
            runtime.workers.close()

    @classmethod
    def _load_checkpoint(cls, runtime: Runtime, run_store: RunStore, state: State, trainer: Path) -> State:
        """Let the runtime continue from the checkpoint with this trainer folder, or from the newest earlier one if
        other files that it needs are damaged. Return its state. Raise CheckpointError where no checkpoint is left."""
        refused: dict[Path, CheckpointError] = {}
        while True:
            try:
                runtime.learners.load(trainer)
            except CheckpointError as exc:
                refused[trainer] = exc
                restored = run_store.restore_checkpoint(refused)
                assert restored is not None, "the checkpoint that was refused is there"
                state, trainer = restored
            else:
                run_store.set_aside(refused, trainer)
                return state

    @classmethod
    def _resume_advice(cls, run_store: RunStore) -> str:
        """Return advice on how to resume a run that ended early; empty without a checkpoint."""
        latest = run_store.latest_checkpoint()
        if latest is None:
            return ""
        return f"the last checkpoint is {latest.name}; continue from it with: {cls._resume_command(run_store)}"

    @classmethod
    def _resume_command(cls, run_store: RunStore) -> str:
        verb = "sft" if cls.mode == "imitation" else "run"
        return f"{console_command()} {verb} {quote_path(run_store.path)} --resume"

    @classmethod
    def _note_resume(cls, error: Exception, run_store: RunStore) -> None:
        message = "\n".join((str(error), *getattr(error, "__notes__", ())))
        if (
            "--resume" not in message
            and not isinstance(error, HookFailed)
            and (advice := cls._resume_advice(run_store))
        ):
            error.add_note(advice)

    def note_progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        self.interrupts.check_stop()
        self._phase = phase, done, total
        self.events.on_progress(self.run_info, phase, done, total)

    def _report_progress(self) -> None:
        """Report progress while waiting for workers."""
        self.events.on_progress(self.run_info, *self.runtime.workers.progress(*self._phase))

    def save_checkpoint(self) -> None:
        checkpoint = self._write_checkpoint()
        self._saved = self.state.step, self.state.evaluated
        self.events.on_checkpoint(self.run_info, self.state.step, checkpoint)

    def _write_checkpoint(self) -> Path:
        """Write a checkpoint; where this attempt wrote one at the same step, replace its state alone."""
        state, keep = self.state, self.spec.train.keep_checkpoints
        state.wall_seconds = perf_counter() - self._start_time
        if self._written == state.step:
            checkpoint = self.run_store.replace_state(state, keep)
        else:
            checkpoint = self.run_store.save_checkpoint(state, self.runtime.learners.save, keep)
        self._written = state.step
        self.record_trace("checkpoint")
        return checkpoint

    def record_trace(self, kind: str, final: bool = False) -> None:
        """Fetch the workers' recorded times for the trace file."""
        try:
            self.runtime.workers.record(kind, self.state.step, self.state.env_steps, self.run_store.path, final)
        except OSError as exc:  # the trace is only for people to look at: no reason to end the run
            if not self._untraced:
                logger.warning("the trace in %s cannot be written: %s; the run continues", self.run_store.path, exc)
            self._untraced = True

    def train_to_end(self) -> dict[str, Any]:
        """Run the attempt and return the content of results.json; exceptions as in `run_attempts`."""
        self._start_time = perf_counter() - self.state.wall_seconds
        self.runtime.workers.listen(self.note_progress, self._report_progress, self._report_fault)
        with open_listeners(self.events, self.run_info):
            results = self._train_and_record()
        if not isinstance(self.interrupts.reason, StopAndSave | None):  # nothing is left to save
            raise self.interrupts.stop_error(
                f"the run itself is finished, and its results are in {self.run_store.path}"
            )
        return results

    def _train_and_record(self) -> dict[str, Any]:
        """Train, and write results.json; exceptions as in `run_attempts`."""
        state = self.state
        self.record_trace("start")
        try:
            self.run_loop()
        except StopRequested:
            if not self.interrupts.worth_saving:
                raise
            raise self._save_and_stop() from None
        except StopAndSave as exc:
            self.interrupts.stop_because(exc)
            if not self.interrupts.worth_saving:
                raise
            raise self._save_and_stop() from None
        state.wall_seconds = perf_counter() - self._start_time
        self.record_trace("end", final=True)
        results = self.run_store.write_results(
            self.spec, state, self.runtime.workers.notes(), self.run_info, self.runtime.workers.time_shares()
        )
        self.events.on_run_end(self.run_info, results)
        return results

    def _save_and_stop(self) -> UserError:
        """Save, unless that is already done. Return the error that ends the run."""
        if isinstance(self.interrupts.reason, RunFolderGone):
            return self.interrupts.reason
        command = self._resume_command(self.run_store)
        message = f"stopped after step {self.state.step}; saved in {self.run_store.path}; continue with: {command}"
        try:
            if self._saved != (self.state.step, self.state.evaluated):
                self.save_checkpoint()
            self.record_trace("end", final=True)
        except (CheckpointError, WorkerDied, OSError) as exc:
            if self.interrupts.reason is None:
                raise
            advice = self._resume_advice(self.run_store)  # a full disk, for one, on which a listener failed first
            return self.interrupts.stop_error(f"{exc}; {advice}" if advice else str(exc))
        return self.interrupts.stop_error(message)

    def pass_milestone(self) -> bool:
        """Evaluate and save between two steps, if due. Return whether to continue training."""
        state = self.state
        self.interrupts.worth_saving = True
        evaluate, save = self.eval_and_save_due()
        save = (save or self._is_finished()) and state.step > 0
        if (evaluate or self._is_finished()) and state.evaluated < state.step:
            if save:
                self._write_checkpoint()  # an evaluation may take hours, in which a run can be killed
            self._evaluate_policy()
        finished = self._is_finished()  # a listener may stop the run for what the evaluation says
        if state.step and (finished or save):
            self.save_checkpoint()
        return not finished

    def _is_finished(self) -> bool:
        return self.state.step >= self.run_info.steps or self.run_info.stop_reason is not None

    @abstractmethod
    def drain_rollouts(self) -> None:
        """Wait until no episode is being collected, so that the evaluation uses one policy version."""

    def _evaluate_policy(self) -> None:
        self.drain_rollouts()
        evaluation = self.runtime.workers.evaluate(self.state.step, self.events.frames_wanted(self.state.step))
        self.state.remember_evaluation(evaluation)
        self.events.on_eval_end(self.run_info, self.state.step, evaluation)
        self.record_trace("evaluation")

    def _report_fault(self, text: str) -> None:
        self.state.faults += 1
        self.events.on_fault(self.run_info, self.state.step + 1, text)


def build_listeners(spec: Spec, failed: Callable[[HookFailed], None] | None = None) -> RunEvents:
    """Return the spec's run-event plugins and the modules of `plugins:` as one listener; `failed` as in `broadcast`."""
    built = [(h.type, build("hook", h.type, h.config, None, spec.plugins)) for h in spec.hooks]
    return broadcast([*built, *hook_modules(spec.plugins)], failed)
