"""Recorded episodes: what to record of a run, and one recorded episode on its way to a writer."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.types import Array

Rows = Literal["steps", "chunks"]


@frozen(kw_only=True)
class RecordSettings:
    """Keys of a hook that records episodes. Simulators keep episodes if one of a run's hooks has such settings, and
    `Rollout.recordings` and `Evaluation.recordings` provide them."""

    what: Literal["evaluation", "rollout", "both"] = "evaluation"
    """Record episodes of evaluations, of training rollouts, or of both."""
    every: int = field(default=0, validator=v.ge(0))
    """Record rollouts and evaluations at multiples of this many steps; 0: all."""
    only: Literal["all", "success", "failure"] = "all"
    """Keep episodes that succeeded (at any step), that failed, or all."""
    max_episodes: int | None = field(default=None, validator=v.optional(v.ge(1)))
    """Most episodes of one rollout or evaluation; none: no limit."""
    rows: Rows = "steps"
    """Rows of an episode. `steps`: a row for each environment step; cameras are then rendered at every step instead of
    once per chunk, which takes longer. `chunks`: a row for each chunk, with the frame that the policy saw and the C
    actions it chose."""

    final_frame: bool = field(default=False)
    """Add a row with the observation after the last action, which repeats that action and has the reward 0. A success
    classifier learns from it ([reward models](../how-to/reward-models.md)); leave it out of data that a policy clones.
    With `rows: steps` only."""

    @final_frame.validator
    def _final_frame(self, attribute: Any, value: bool) -> None:
        if value and self.rows != "steps":
            raise ValueError("needs rows: steps, since no separate row follows a chunk")

    def is_recorded(self, what: Literal["evaluation", "rollout"], step: int) -> bool:
        """Return whether the rollout or the evaluation at `step` is recorded."""
        return self.what in (what, "both") and (self.every == 0 or step % self.every == 0)

    def keeps_episode(self, success: bool) -> bool:
        """Return whether an episode with this outcome is kept."""
        return self.only == "all" or success == (self.only == "success")


def settings_in(hooks: Sequence[Any]) -> RecordSettings | None:
    """Return the settings of the first of a spec's hooks that records episodes; None: no hook does."""
    return next((hook.config for hook in hooks if isinstance(hook.config, RecordSettings)), None)


@frozen(kw_only=True, eq=False)
class Recording:
    """A recorded episode of n rows: observations and actions."""

    images: Mapping[str, Sequence[bytes]]
    """Images by camera, n PNG files each, taken before the action of the row."""
    sizes: Mapping[str, tuple[int, int]]
    """Image sizes by camera, (height, width) in pixels."""
    state: Array
    """Proprioceptive state before the action, float32 [n, S]; S may be 0."""
    actions: Array
    """Actions, float32 [n, A], of chunks [n, C, A], in the simulator's units: executed, or after an end as chosen."""
    action_names: tuple[str, ...] = ()
    """Names of an action's A numbers, in order; empty: not known."""
    state_names: tuple[str, ...] = ()
    """Names of the state's S numbers, in order; empty: not known."""
    instruction: str
    task: str = ""
    identity: str = ""
    """Identity that a writer recognises the episode by; empty: never equal to another."""
    success: bool | None = None
    """Whether the episode succeeded; None: unknown."""
    rewards: Array | None = None
    """Rewards, float32 [n]; None: unknown."""
    executed: Array | None = None
    """Actions of each chunk that were executed before the episode ended, int64 [n]; None: rows are single actions."""
    interventions: Array | None = None
    """Whether a person or an expert chose the action, bool [n], of chunks [n, C]; None: takeovers are not possible."""

    def __len__(self) -> int:
        return len(self.actions)


def encode_png(image: Array) -> bytes:
    """Encode an image, uint8 [H, W, 3], as PNG; fast rather than small."""
    import numpy as np
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
