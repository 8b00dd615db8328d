"""Listener that passes a run to an experiment tracker: configuration, metrics, evaluation videos and checkpoints. One
run here is one there, however often it resumes. A plugin adds a `Store`, the interface to its tracker.

A separate thread talks to the tracker, so that neither a slow network nor a large checkpoint delays training. The first
failure is logged, and what fails is skipped.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, Literal, Protocol

from attrs import field, frozen, validators

from vla_rl.core.events import Evaluation, Run, robot_metrics
from vla_rl.core.paths import link_or_copy, write_whole

logger = logging.getLogger(__name__)

FILE = "trackers.json"
"""File in the run folder with the id that each tracker knows the run by."""
HELD = ".uploading"
"""Folder in the run folder with checkpoints that wait for their upload, in a folder of each tracker's name. Plugins
declare that one in `HookPlugin.files`."""
FAILING_WAIT_S = 10.0
"""Seconds to wait at the end for a tracker that failed last, or whose run was stopped."""


@frozen(kw_only=True)
class TrackerSettings:
    """Settings in the config of every tracker plugin."""

    name: str | None = None
    """Name of the run in the tracker; null: the spec's."""
    videos: bool = True
    """Upload the videos that the hook `video` makes of evaluations."""
    artifacts: Literal["none", "last", "all"] = "none"
    """Checkpoints to upload: none, the last one at the end of the run, or each as it is saved."""
    wait_s: float = field(default=300.0, validator=[validators.ge(0), validators.le(7 * 86_400.0)])
    """Seconds that the end of the run waits for the tracker to take what is left."""


class Store(Protocol):
    """Interface to one tracker. One thread calls all methods; their exceptions never reach the run."""

    def open_run(self, run: Run, known: str | None) -> tuple[str, str]:
        """Open the tracker's run; called first. `known`: id to resume; None: a new one. Return (id, where it is)."""

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers at a step. Steps that a killed run had already logged may come again."""

    def upload_video(self, step: int, file: Path) -> None:
        """Upload an mp4 of an episode of the evaluation at a step."""

    def upload_checkpoint(self, step: int, folder: Path) -> None:
        """Upload a checkpoint folder, which is deleted after this returns."""

    def close_run(self, finished: bool) -> None:
        """Close the tracker's run; called last, after `open_run`. `finished`: False if it was stopped or failed."""


class Tracker:
    """Listener that passes a run to a tracker."""

    def __init__(self, name: str, settings: TrackerSettings, store: Store) -> None:
        self._name = name
        self._settings = settings
        self._store = store
        self._todo: SimpleQueue[tuple[str, Callable[[], None]] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._run: Run | None = None
        self._refused = self._finished = self._failing = self._warned = False
        self._evaluated: int | None = None
        """Step of an evaluation whose videos may still come."""
        self._saved: tuple[int, Path] | None = None

    # ------------------------------------------------------------------------------------------------- events

    def on_run_start(self, run: Run) -> None:
        self._run = run
        shutil.rmtree(Path(run.folder) / HELD / self._name, ignore_errors=True)  # left by a run that was killed
        self._thread = Thread(target=self._run_thread, name=f"tracker {self._name}", daemon=True)
        self._thread.start()

    def on_update_end(self, step: int, metrics: dict[str, float]) -> None:
        self._upload_videos()
        self._enqueue_call("metrics", lambda: self._store.log_metrics(step, metrics))

    def on_eval_end(self, step: int, evaluation: Evaluation) -> None:
        values = scalars_of(evaluation)
        self._enqueue_call("an evaluation", lambda: self._store.log_metrics(step, values))
        self._evaluated = step

    def on_checkpoint(self, step: int, folder: Path) -> None:
        self._upload_videos()
        self._saved = step, folder
        if self._settings.artifacts == "all":
            self._upload_checkpoint()

    def on_run_end(self) -> None:
        self._upload_videos()
        if self._settings.artifacts == "last":
            self._upload_checkpoint()
        self._finished = True

    def on_close(self) -> None:
        """Wait for the tracker to take what is left, but only briefly if the run was stopped or the tracker fails."""
        if self._thread is None:
            return
        thread = self._thread
        self._thread = None
        self._todo.put(None)
        begun, warned = monotonic(), False
        while thread.is_alive():
            waited = monotonic() - begun
            limit = min(self._settings.wait_s, FAILING_WAIT_S if self._failing or not self._finished else float("inf"))
            if waited > limit:
                logger.warning("%s did not take all of the run within %.0f s; the rest is left out", self._name, limit)
                return
            if waited > 2 and not warned:
                warned = True
                print(f"{self._name}: uploading what is left, for {limit:.0f} s at most", file=sys.stderr, flush=True)
            thread.join(0.1)

    # ------------------------------------------------------------------------------------------------- inside

    def _upload_videos(self) -> None:
        """Hand in the last evaluation's videos, which a hook may make after this one heard of it: looked up later."""
        step = self._evaluated
        self._evaluated = None
        if step is None or self._run is None or not self._settings.videos:
            return
        for file in sorted((Path(self._run.folder) / "videos").glob(f"step_{step:06d}_ep*.mp4")):
            self._enqueue_call("a video", lambda file=file: self._store.upload_video(step, file))  # type: ignore[misc]

    def _upload_checkpoint(self) -> None:
        """Hand in the last checkpoint as a copy, since the run may remove it before its upload."""
        if self._saved is None or self._run is None or self._refused:
            return
        step, folder = self._saved
        copied = Path(self._run.folder) / HELD / self._name / folder.name
        try:
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(folder, copied, copy_function=link_or_copy)
        except OSError as exc:
            self._warn_once("a checkpoint", exc)
            return

        def upload_copy() -> None:
            try:
                self._store.upload_checkpoint(step, copied)
            finally:
                shutil.rmtree(copied, ignore_errors=True)
                with suppress(OSError):  # not empty
                    copied.parent.rmdir()
                    copied.parent.parent.rmdir()

        self._enqueue_call("a checkpoint", upload_copy)

    def _enqueue_call(self, what: str, call: Callable[[], None]) -> None:
        if self._thread is not None:
            self._todo.put((what, call))

    def _run_thread(self) -> None:
        """Run the tracker's thread: open, pass events in order, close."""
        assert self._run is not None
        try:
            self._open_run(self._run)
        except BaseException as exc:  # a tracker may raise anything, SystemExit too
            self._refused = self._failing = True
            shutil.rmtree(Path(self._run.folder) / HELD / self._name, ignore_errors=True)
            error = _format_error(exc)
            logger.warning("%s takes nothing of this run, which continues without it: %s", self._name, error)
            return
        while (item := self._todo.get()) is not None:
            what, call = item
            try:
                call()
                self._failing = False
            except BaseException as exc:
                self._failing = True
                self._warn_once(what, exc)
        try:
            self._store.close_run(self._finished)
        except BaseException as exc:
            self._warn_once("the end of the run", exc)

    def _open_run(self, run: Run) -> None:
        file = Path(run.folder) / FILE
        run_ids: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        name, where = self._store.open_run(run, run_ids.get(self._name) if run.first_step else None)
        write_whole(file, json.dumps(run_ids | {self._name: name}, indent=1) + "\n")
        print(f"{self._name}: {where}", file=sys.stderr, flush=True)

    def _warn_once(self, what: str, exc: BaseException) -> None:
        if not self._warned:
            self._warned = True
            text = "%s did not take %s: %s\n  the run continues; further failures are not shown"
            logger.warning(text, self._name, what, _format_error(exc))


def scalars_of(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of an evaluation: its rate, the interval, each task, the time."""
    success = evaluation.success
    return {
        "eval/success_rate": success.rate,
        "eval/success_low": success.low,
        "eval/success_high": success.high,
        **{f"eval_task/{name}": rate.rate for name, rate in evaluation.tasks.items()},
        **robot_metrics("eval", evaluation.episodes),
        "time/eval": evaluation.seconds,
    }


def flatten_spec(spec: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested keys, {"train": {"lr": 1}} -> {"train.lr": 1}; lists stay whole."""
    flattened: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, Mapping) and value:
            flattened |= flatten_spec(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value
    return flattened


def _format_error(exc: BaseException) -> str:
    return (str(exc).strip() or type(exc).__name__).partition("\n\n")[0]
