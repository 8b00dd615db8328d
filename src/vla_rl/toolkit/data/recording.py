"""Episodes as they are recorded: what to record of a run, and one recorded episode on its way to a writer."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.types import Array

Rows = Literal["steps", "chunks"]


@frozen(kw_only=True)
class RecordSettings:
    """Keys of a hook that records episodes: simulators keep them where one of a run's hooks has such settings, and
    `Rollout.recordings` and `Evaluation.recordings` hand them out."""

    what: Literal["evaluation", "rollout", "both"] = "evaluation"
    """Of evaluations, of training rollouts, or of both."""
    every: int = field(default=0, validator=v.ge(0))
    """Rollouts and evaluations at multiples of this many steps; 0: all."""
    only: Literal["all", "success", "failure"] = "all"
    """Those that succeeded (at any step), that failed, or all."""
    max_episodes: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Of one rollout or evaluation; none: no limit."""
    rows: Rows = "steps"
    """`steps`: a row for each environment step; cameras are then drawn at every step instead of once a chunk, which
    takes longer. `chunks`: a row for each chunk, with the frame that the policy saw and the C actions it chose."""

    def records(self, what: Literal["evaluation", "rollout"], step: int) -> bool:
        """Whether the rollout or the evaluation at `step` is recorded."""
        return self.what in (what, "both") and (self.every == 0 or step % self.every == 0)

    def keeps(self, success: bool) -> bool:
        """Whether an episode with this outcome is kept."""
        return self.only == "all" or success == (self.only == "success")


def settings_in(hooks: Sequence[Any]) -> RecordSettings | None:
    """Those of the first of a spec's hooks that records episodes; None: there is none."""
    return next((hook.config for hook in hooks if isinstance(hook.config, RecordSettings)), None)


@frozen(kw_only=True, eq=False)
class Recording:
    """An episode of n rows: what was seen, and what was done about it."""

    images: Mapping[str, Sequence[bytes]]
    """Camera -> n images, PNG, before the action of the row."""
    sizes: Mapping[str, tuple[int, int]]
    """Camera -> (height, width) in pixels."""
    state: Array
    """float32 [n, S], before the action; S may be 0."""
    actions: Array
    """float32 [n, A], or of whole chunks [n, C, A], in the simulator's units, as they were executed or, behind the end
    of an episode, chosen."""
    instruction: str
    task: str = ""
    identity: str = ""
    """Of this episode, by which a writer knows what it has; empty: never the same as another."""
    success: bool | None = None
    """None: nobody knows."""
    rewards: Array | None = None
    """float32 [n]; None: nobody knows."""
    executed: Array | None = None
    """int64 [n]: of chunks, how many actions were executed before the episode ended; None: of single actions."""

    def __len__(self) -> int:
        return len(self.actions)


def png(image: Array) -> bytes:
    """uint8 [H, W, 3] -> PNG, written fast rather than small."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
