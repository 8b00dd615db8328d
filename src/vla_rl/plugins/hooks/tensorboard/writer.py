"""Writes scalars of every step and evaluation as TensorBoard events."""

from __future__ import annotations

import yaml
from torch.utils.tensorboard import SummaryWriter

from vla_rl.core.events import Evaluation, Run
from vla_rl.toolkit.hooks.tracking import scalars_of
from vla_rl.toolkit.no_settings import NoSettings

FLUSH_SECONDS = 30
"""Longest time that a written number stays in memory. A killed run loses at most this much of its curves, which its
`metrics.jsonl` has."""


class TensorboardWriter:
    """Writes one event file a start of the run; a resumed run purges what the killed one wrote after its checkpoint."""

    def __init__(self, config: NoSettings) -> None:
        self._writer: SummaryWriter | None = None

    def on_run_start(self, run: Run) -> None:
        self._writer = SummaryWriter(
            log_dir=str(run.folder),
            purge_step=run.first_step + 1 if run.first_step else None,
            flush_secs=FLUSH_SECONDS,
        )
        if run.first_step == 0:
            spec = yaml.safe_dump(dict(run.spec), sort_keys=False, default_flow_style=None, width=100)
            self._writer.add_text("spec", f"```yaml\n{spec}\n```", 0)

    def on_update_end(self, step: int, metrics: dict[str, float]) -> None:
        self._write_scalars(metrics, step)

    def on_eval_end(self, step: int, evaluation: Evaluation) -> None:
        self._write_scalars(scalars_of(evaluation), step)
        if self._writer is not None:
            self._writer.flush()

    def on_close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_scalars(self, scalars: dict[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
