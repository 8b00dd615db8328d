"""Totals of training in imagination over a run, and their file in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from vla_rl.core.errors import CheckpointError
from vla_rl.core.run.flow import Ledger
from vla_rl.toolkit.json_files import read_record

FILE = "imagination.json"


class ImaginationTotals:
    """Sums over the run, up to the last finished step."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "imagined_steps": 0,
            "imagined_episodes": 0,
            "fit_updates": 0,
            "fit_seconds": 0.0,
            "paused_steps": 0,
            "paused": "",
        }
        self._of_step: dict[str, Any] = {}
        """Increments of the running step, added when it is over."""

    @property
    def pause_reason(self) -> str:
        """Reason why nothing was imagined in the last finished step; "" where something was."""
        reason: str = self.values["paused"]
        return reason

    def record_step(self, metrics: Mapping[str, float], fit_updates: int, paused: str) -> None:
        """Record the running step. `paused`: reason why nothing was imagined, or ""."""
        self._of_step = {
            "imagined_steps": int(metrics.get("imagination/env_steps", 0)),
            "imagined_episodes": int(metrics.get("imagination/episodes", 0)),
            "fit_updates": fit_updates,
            "fit_seconds": metrics["time/fit"],
            "paused_steps": int(bool(paused)),
            "paused": paused,
        }

    def add_step(self) -> None:
        """Add the step, which is over."""
        for name, value in self._of_step.items():
            self.values[name] = value if isinstance(value, str) else self.values[name] + value
        self._of_step = {}

    def with_tickets(self, ledger: Ledger) -> dict[str, Any]:
        """Return the totals, with the counts of imagined tickets, as plain data."""
        return {**self.values, "tickets": attrs.asdict(ledger)}

    def save(self, folder: Path, ledger: Ledger) -> None:
        (folder / FILE).write_text(json.dumps(self.with_tickets(ledger), indent=1), encoding="utf-8")

    def load(self, folder: Path) -> Ledger:
        """Restore what `save` wrote, and return the counts of imagined tickets."""
        self.values = dict(read_record(folder / FILE, CheckpointError).data)
        return Ledger(**self.values.pop("tickets"))
