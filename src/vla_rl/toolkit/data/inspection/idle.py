"""Finds data sets in which nothing happens for much of the time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vla_rl.toolkit.data.idle_steps import find_idle_steps
from vla_rl.toolkit.data.inspection.recorded import DataFinding, RecordedData

MANY_IDLE = 0.4
"""Share of idle frames from which it is reported."""


def find_idle_frames(data: RecordedData) -> Iterator[DataFinding]:
    """Yield that many frames of a data set are idle."""
    vectors = [episode.vectors for episode in data.episodes]
    idle = find_idle_steps([(one[data.action], None if data.state is None else one[data.state]) for one in vectors])
    share = float(np.concatenate(idle).mean())
    if share > MANY_IDLE:
        yield DataFinding(
            subject=data.action,
            message=f"nothing moves and no command changes in {share:.0%} of the frames; a clone learns to stand still",
            remedy="the data's key `drop_no_ops: true` leaves them out",
        )
