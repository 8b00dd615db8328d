"""Weights & Biases client of the `wandb` hook."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from vla_rl.core.errors import UserError
from vla_rl.core.events import Run
from vla_rl.plugins.hooks.trackers.config import WandbConfig
from vla_rl.toolkit.hooks.tracking import Tracker

STEP = "step"
"""Metric that is the x axis of all curves. wandb's own step only grows, and refuses steps that a run repeats."""


def make_tracker(config: WandbConfig) -> Tracker:
    """Return the hook, which is `Tracker` with this store."""
    return Tracker("wandb", config, WandbStore(config))


class WandbStore:
    """Run on Weights & Biases, with files in `wandb` of the run folder."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None
        self._offline = False

    def open_run(self, run: Run, known: str | None) -> tuple[str, str]:
        config = self._config
        mode: Any = config.mode or os.environ.get("WANDB_MODE", "online")  # wandb refuses other words
        self._offline = mode != "online"
        if not self._offline and not wandb.login(prompt=False):
            raise UserError("no user is logged in; try `wandb login`, or set WANDB_API_KEY, or `mode: offline`")
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or run.name,
            group=config.group,
            tags=list(config.tags) or None,
            job_type=run.mode,
            config=dict(run.spec),
            dir=str(run.folder),
            mode=mode,
            id=known,
            resume="allow" if known else None,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        folder = Path(self._run.dir).parent
        return self._run.id, f"`wandb sync {folder}` uploads it" if self._offline else str(self._run.url)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def upload_video(self, step: int, file: Path) -> None:
        name = file.stem.split("_")[2]  # "ep0" of step_000020_ep0_success
        self._run.log({f"videos/{name}": wandb.Video(str(file), caption=file.stem, format="mp4"), STEP: step})

    def upload_checkpoint(self, step: int, folder: Path) -> None:
        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata={STEP: step})
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):  # like add_dir, which prints
            artifact.add_file(str(file), name=str(file.relative_to(folder)))
        logged = self._run.log_artifact(artifact, aliases=["latest", folder.name])
        if not self._offline:
            logged.wait()

    def close_run(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
