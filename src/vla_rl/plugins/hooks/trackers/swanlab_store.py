"""SwanLab client of the `swanlab` hook."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import swanlab

from vla_rl.core.events import Run
from vla_rl.core.paths import link_or_copy
from vla_rl.plugins.hooks.trackers.config import SwanlabConfig
from vla_rl.toolkit.hooks.tracking import Tracker


def make_tracker(config: SwanlabConfig) -> Tracker:
    """Return the hook, which is `Tracker` with this store."""
    return Tracker("swanlab", config, SwanlabStore(config))


class SwanlabStore:
    """Run on SwanLab, with files in `swanlog` of the run folder."""

    def __init__(self, config: SwanlabConfig) -> None:
        self._config = config
        self._run: Any = None

    def open_run(self, run: Run, known: str | None) -> tuple[str, str]:
        config = self._config
        log_folder = Path(run.folder) / "swanlog"
        log_folder.mkdir(exist_ok=True)
        mode = config.mode or os.environ.get("SWANLAB_MODE", "online")
        self._run = swanlab.init(
            project=config.project,
            workspace=config.workspace,
            name=config.name or run.name,
            tags=list(config.tags) or None,
            job_type=run.mode,
            config=dict(run.spec),
            log_dir=str(log_folder),
            mode=mode,
            id=known,
            resume="must" if known else "never",
            reinit=True,
            settings=swanlab.Settings(interactive=False),
        )
        return self._run.id, str(self._run.url if mode == "online" else self._run.dir)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in values.items()}, step=step)

    def upload_video(self, step: int, file: Path) -> None:
        """Upload a video as GIF: SwanLab takes no mp4."""
        frames, fps = imageio.imread(file), imageio.immeta(file)["fps"]
        gif = imageio.imwrite("<bytes>", frames, extension=".gif", duration=1000 / fps, loop=0)
        name = file.stem.split("_")[2]  # "ep0" of step_000020_ep0_success
        self._run.log({f"videos/{name}": swanlab.Video(BytesIO(gif), caption=file.stem)}, step=step)

    def upload_checkpoint(self, step: int, folder: Path) -> None:
        """Copy a checkpoint next to SwanLab's files, where it has to stay until it is uploaded."""
        copied = Path(self._run.dir).resolve() / "checkpoints" / folder.name
        shutil.copytree(folder, copied, copy_function=link_or_copy)
        files = sorted(file for file in copied.rglob("*") if file.is_file())
        for file in files:
            self._run.save(str(file), base_path=str(copied.parents[1]), policy="now")

    def close_run(self, finished: bool) -> None:
        self._run.finish(state="success" if finished else "aborted")
