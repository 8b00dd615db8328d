"""Warning about a run whose policy stands still although it is trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from attrs import define, field

from vla_rl.core.spec.spec import Spec

logger = logging.getLogger(__name__)
WEIGHTS_CHANGED = "update/weights_changed"
LEAST = 0.01
"""Share of the trained weights that one training step has to change."""
STEPS = 10
"""Training steps after which a run is warned."""
FULL_RATE = 0.5
"""Factor on learning rates from which on a training step counts: a warm-up is meant to change little."""


@define
class WeightChangeMonitor:
    """Warns once if `update/weights_changed` reaches `LEAST` in none of a run's first steps; later it may be less."""

    spec: Spec
    _shares: list[float] = field(factory=list, init=False)
    _watching: bool = field(default=True, init=False)

    def note_metrics(self, metrics: Mapping[str, float], rate_factor: float) -> None:
        """Note the metrics of a training step, and log a warning where it is due."""
        share = metrics.get(WEIGHTS_CHANGED)
        if share is None or not self._watching or rate_factor < FULL_RATE:
            return
        self._shares.append(share)
        self._watching = share < LEAST and len(self._shares) < STEPS
        if max(self._shares) < LEAST and not self._watching:
            logger.warning("%s", self._warning_text())

    def _warning_text(self) -> str:
        dtype = getattr(self.spec.model.config, "dtype", "float32")
        precision = "" if dtype == "float32" else ", or set model.dtype: float32, in which smaller steps show"
        return (
            f"warning: the policy hardly moves: each of {STEPS} training steps changed at most {max(self._shares):.2%} "
            f"of its trained weights as it acts with them ({dtype}; {WEIGHTS_CHANGED}); raise the learning rate"
            f"{precision}"
        )
