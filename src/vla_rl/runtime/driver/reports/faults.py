"""Faults of envs that a run survives."""

from __future__ import annotations

from collections.abc import Callable

from vla_rl.core.spec.spec import Spec
from vla_rl.runtime.messages.requests import too_many_faults


class FaultLog:
    """Reports and counts the faults of envs in all workers, up to `runtime.max_faults`."""

    def __init__(self, spec: Spec) -> None:
        self.env_type = spec.env.type
        self.limit = spec.runtime.max_faults
        self.count = 0
        """Number of envs that broke and were replaced."""
        self.on_fault: Callable[[str], None] = lambda text: None

    def report_faults(self, texts: list[str]) -> None:
        """Report these faults and clear the list, so that each is reported once. Raises StopAndSave if too many."""
        for text in texts:
            self.on_fault(text)
        self.count += len(texts)
        if self.count > self.limit:
            raise too_many_faults(self.count, self.limit, self.env_type, texts[-1])
        texts.clear()
