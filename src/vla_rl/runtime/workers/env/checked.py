"""What goes into a simulator and what comes out of it, checked: whoever breaks the contract is named."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve

from vla_rl.core.types import Array, ChunkResult, EnvInfo, Observation, to_numpy
from vla_rl.runtime.messages.requests import EnvError, EpisodeRequest

BOUND_TOLERANCE = 1e-4


def checked_observation(env: str, info: EnvInfo, obs: Observation, n: int, method: str) -> Observation:
    """The observation of `n` rows that `method` returned, contiguous in memory. Raises EnvError."""
    if len(obs) != n:
        raise EnvError(f"env {env!r}: {method} returned {len(obs)} instructions for {n} rows")
    for camera, (height, width) in info.cameras.items():
        if camera not in obs.images:
            raise EnvError(
                f"env {env!r}: {method} returned no image of camera {camera!r}; it returned: "
                f"{', '.join(obs.images) or 'none'}"
            )
        _check_array(env, obs.images[camera], (n, height, width, 3), "uint8", f"image {camera!r} of {method}")
    if info.state_dim:
        _check_array(env, obs.state, (n, info.state_dim), "float32", f"state of {method}")
        state = to_numpy(obs.state)
        if not np.isfinite(state).all():
            row = int(np.argwhere(~np.isfinite(state))[0][0])
            raise EnvError(f"env {env!r}: {method} returned a state that is not finite in row {row}")
    return obs.contiguous()


def checked_result(env: str, info: EnvInfo, result: ChunkResult, rows: int, width: int) -> ChunkResult:
    """The result of `width` actions in `rows` rows, with a contiguous observation. Raises EnvError."""
    obs = checked_observation(env, info, result.obs, rows, "chunk_step")
    _check_array(env, result.rewards, (rows, width), "float32", "rewards")
    for field in ("terminated", "truncated", "executed"):
        _check_array(env, getattr(result, field), (rows, width), "bool", field)
    _check_array(env, result.success, (rows,), "bool", "success")
    rewards = to_numpy(result.rewards)
    if not np.isfinite(rewards).all():
        row, step = (int(i) for i in np.argwhere(~np.isfinite(rewards))[0])
        raise EnvError(f"env {env!r} returned the reward {rewards[row, step]} in row {row}, action {step}")
    return evolve(result, obs=obs)


def checked_actions(env: str, info: EnvInfo, actions: Any, rows: Array, chunk: int) -> Array:
    """float32 [R, C, A], clipped to the bounds that they may miss by rounding. Raises EnvError."""
    actions = np.asarray(to_numpy(actions), np.float32)
    low, high = np.asarray(info.action_low, np.float32), np.asarray(info.action_high, np.float32)
    want = (len(rows), chunk, len(low))
    if actions.shape != want:
        raise EnvError(f"actions for env {env!r} have shape {actions.shape}, expected {want} (rows, chunk, dims)")
    outside = ~((actions >= low - BOUND_TOLERANCE) & (actions <= high + BOUND_TOLERANCE))
    if outside.any():
        row, step, dim = (int(i) for i in np.argwhere(outside)[0])
        raise EnvError(
            f"the policy chose {actions[row, step, dim]:g} in dimension {dim} (row {int(rows[row])}, action {step} of "
            f"the chunk), outside of the bounds [{low[dim]:g}, {high[dim]:g}] of env {env!r}; check that the "
            f"checkpoint's action statistics (unnorm_key) belong to this simulator"
        )
    clipped: Array = np.clip(actions, low, high)
    return clipped


def not_deterministic(env: str, start: EpisodeRequest, chunks: str, paid: str) -> EnvError:
    """What to raise where an episode comes out otherwise the second time: which chunk of it, and what it paid."""
    return EnvError(
        f"env {env!r} is not deterministic: {chunks} of an episode (state {start.state.id} of task "
        f"{start.state.task!r}), executed again from the same state and seed, ended it or paid {paid}; its info has to "
        f"say so (EnvInfo(deterministic=False)): then streams of auto_reset begin anew where they cannot go on"
    )


def _check_array(env: str, array: Any, shape: tuple[int, ...], dtype: str, what: str) -> None:
    if not hasattr(array, "shape"):
        raise EnvError(f"env {env!r}: {what} is {array!r:.80}, expected {dtype} {shape}")
    if tuple(array.shape) != shape:
        raise EnvError(f"env {env!r}: {what} has shape {tuple(array.shape)}, expected {shape}")
    found = str(array.dtype).removeprefix("torch.")
    if found != dtype:
        raise EnvError(f"env {env!r}: {what} is {found}, expected {dtype}; convert it in the simulator's plugin")
