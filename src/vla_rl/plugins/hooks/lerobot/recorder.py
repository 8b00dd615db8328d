"""Writes the recorded episodes of a run to a data set, each episode once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from attrs import evolve

from vla_rl.core.contexts import CheckContext
from vla_rl.core.errors import UserError
from vla_rl.core.events import Evaluation, Run
from vla_rl.core.spec.structure import at
from vla_rl.core.types import Rollout
from vla_rl.plugins.hooks.lerobot.config import LeRobotHookConfig
from vla_rl.toolkit.data.lerobot import LeRobotWriter, check_folder
from vla_rl.toolkit.data.recording import Recording
from vla_rl.toolkit.hooks.files import check_outside

FPS = 10
"""Rows a second where a simulator does not say how long an action takes."""


def check_data_set(config: LeRobotHookConfig, context: CheckContext) -> None:
    """Raise UserError for a folder that is something else than a data set of this format."""
    if config.folder is not None:
        with at("folder"):
            check_folder(config.folder)


class LeRobotRecorder:
    """Writer hook. A resumed run repeats steps; their episodes are recognised by identity and not written twice."""

    def __init__(self, config: LeRobotHookConfig) -> None:
        self._config = config
        self._writer: LeRobotWriter | None = None
        self._run = ""

    def on_run_start(self, run: Run) -> None:
        folder = self._config.folder or Path(run.folder) / "lerobot"
        if self._config.folder is not None and Path(run.folder) != Path():
            check_outside(Path(run.folder), folder, "folder")
        place = hashlib.sha256(str(Path(run.folder).resolve()).encode()).hexdigest()[:12]
        self._run = f"{run.name} {place}"
        env = run.spec["env"]
        fps = self._config.fps or max(1, round(env.get("control_hz") or FPS))
        self._writer = LeRobotWriter(folder, fps=fps, robot=str(env["type"]))
        features = self._writer.features
        if features is not None and self._config.rows != ("chunks" if "action.executed" in features else "steps"):
            raise UserError(
                f"{folder} has other rows than rows: {self._config.rows}, and a data set has rows of one kind; choose "
                "another folder, or the other setting"
            )

    def on_rollout_end(self, run: Run, step: int, rollout: Rollout, metrics: dict[str, float]) -> None:
        self._write_recordings(rollout.recordings)

    def on_eval_end(self, run: Run, step: int, evaluation: Evaluation) -> None:
        self._write_recordings(evaluation.recordings)

    def on_close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write_recordings(self, recordings: Iterable[Recording]) -> None:
        assert self._writer is not None, "on_run_start comes first"
        for recording in islice(recordings, self._config.max_episodes):
            self._writer.add(evolve(recording, identity=f"{self._run}, {recording.identity}"))
