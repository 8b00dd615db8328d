"""Who sees all that the rows of a lane see and do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from vla_rl.core.types import Array, Observation
from vla_rl.runtime.messages.requests import EpisodeRequest


class RolloutObserver(Protocol):
    """Somebody who sees all of a lane's episodes: `runtime/imagination` records them."""

    def began(self, rows: Array, starts: Sequence[EpisodeRequest], seeds: Array, obs: Observation) -> None:
        """These rows (int64 [R]) were reset, with these seeds (int64 [R]); `obs` is theirs."""

    def moved(self, rows: Array, actions: Array, record: Mapping[str, Array], success: Array, obs: Observation) -> None:
        """These rows executed a chunk. Of all rows: actions float32 [N, C, A] as they were asked for; masks [N, C] as
        `Accounts.add` gives them; whether the last action solved the task, bool [N]; what was seen after it."""
