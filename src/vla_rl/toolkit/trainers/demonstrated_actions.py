"""Check of demonstrations that are mixed with what a run collects."""

from __future__ import annotations

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.types import EnvInfo, to_numpy

FAR_OUTSIDE = 2.0
"""Distance from the middle of the actions' range, in half ranges, that only actions of another kind have."""


def refuse_masked_actions(recording: Demonstrations) -> None:
    """Raises UserError for data that leave actions out of the loss, which behaviour cloning alone can."""
    if recording.recorded_actions(np.zeros(1, np.int64)) is not None:
        raise UserError(
            "imitation.data: `ends: mask` is for trainer behaviour_cloning alone; set `ends: repeat` or `drop`"
        )


def check_demonstrated_actions(recording: Demonstrations, info: EnvInfo, chunk: int) -> None:
    """Raises UserError for demonstrations with other chunks, actions of another space, or masked ones. Reads a few."""
    refuse_masked_actions(recording)
    count = recording.num_samples()
    few = np.linspace(0, count - 1, min(count, 64)).astype(np.int64)
    actions = to_numpy(recording.read_samples(few)[1])
    expected = (chunk, info.action_dim)
    if actions.shape[1:] != expected:
        raise UserError(
            f"the demonstrations of imitation.data have chunks of {actions.shape[1]} actions of {actions.shape[2]} "
            f"numbers, the simulator and rollout.chunk ask for {expected[0]} of {expected[1]}; give demonstrations of "
            "this simulator, or set rollout.chunk"
        )
    low = np.array(info.action_low)
    high = np.array(info.action_high)
    distances = np.abs(actions - (low + high) / 2) / ((high - low) / 2)
    number = int(distances.max((0, 1)).argmax())
    if distances.max() > FAR_OUTSIDE:
        raise UserError(
            f"the demonstrations of imitation.data have actions of another space: number {number} goes up to "
            f"{np.abs(actions[..., number]).max():g}, and the simulator takes {low[number]:g} to {high[number]:g}; "
            "give demonstrations in the simulator's units"
        )
