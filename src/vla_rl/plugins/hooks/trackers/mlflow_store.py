"""MLflow client of the `mlflow` hook."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from vla_rl.core.events import Run
from vla_rl.plugins.hooks.trackers.config import MlflowConfig
from vla_rl.toolkit.hooks.tracking import Tracker, flatten_spec

BATCH, LONGEST = 100, 6000
"""Most parameters in a request, and most characters of a parameter's value; servers refuse more."""


def make_tracker(config: MlflowConfig) -> Tracker:
    """Return the hook, which is `Tracker` with this store."""
    return Tracker("mlflow", config, MlflowStore(config))


class MlflowStore:
    """Run in MLflow: the spec's keys are parameters, videos and checkpoints are artifacts."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._client: Any = None
        self._id = ""

    def open_run(self, run: Run, known: str | None) -> tuple[str, str]:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # else it logs each table that it creates
        configured_uri = self._config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        runs_folder = Path(run.folder).resolve().parent
        uri = configured_uri or f"sqlite:///{runs_folder / 'mlflow.db'}"
        self._client = MlflowClient(uri)
        experiment = self._find_experiment(None if configured_uri else str(runs_folder / "mlartifacts"))
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._id = known
        else:
            tags = {"mode": run.mode, **self._config.tags}
            created = self._client.create_run(experiment, run_name=self._config.name or run.name, tags=tags)
            self._id = created.info.run_id
            self._log_spec(run.spec)
        page = f"{uri}/#/experiments/{experiment}/runs/{self._id}"
        return self._id, page if uri.startswith("http") else f"run {self._id} in {uri}"

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time() * 1000)
        self._client.log_batch(
            self._id, metrics=[Metric(_clean_name(name), float(value), now, step) for name, value in values.items()]
        )

    def upload_video(self, step: int, file: Path) -> None:
        self._client.log_artifact(self._id, str(file), "videos")

    def upload_checkpoint(self, step: int, folder: Path) -> None:
        self._client.log_artifacts(self._id, str(folder), f"checkpoints/{folder.name}")

    def close_run(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")

    def _find_experiment(self, artifacts: str | None) -> str:
        name = self._config.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=artifacts))
            except MlflowException:  # another run created it meanwhile
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _log_spec(self, spec: Mapping[str, Any]) -> None:
        """Log each key of the spec as a parameter, and the whole spec as a file."""
        parameters = [Param(_clean_name(key), str(value)[:LONGEST]) for key, value in flatten_spec(spec).items()]
        for first in range(0, len(parameters), BATCH):
            self._client.log_batch(self._id, params=parameters[first : first + BATCH])
        self._client.log_text(self._id, yaml.safe_dump(dict(spec), sort_keys=False), "spec.yaml")


def _clean_name(name: str) -> str:
    """Return a name with only letters, digits and the few signs that MLflow allows; task names may have others."""
    return re.sub(r"[^\w.\-/ ]", "_", name, flags=re.ASCII)
