"""Checks of what goes into a simulator and what comes out of it. Errors name the side that broke the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve

from vla_rl.core.fields import read_field, shape_of
from vla_rl.core.samples import result_fields
from vla_rl.core.types import BOUND_TOLERANCE, ActionSource, Array, ChunkResult, EnvInfo, Observation, to_numpy
from vla_rl.runtime.messages.requests import EnvError, EpisodeRequest


def checked_observation(env: str, info: EnvInfo, obs: Observation, n: int, method: str) -> Observation:
    """Return the observation of `n` envs that `method` returned, contiguous in memory. Raises EnvError."""
    if len(obs) != n:
        raise EnvError(f"env {env!r}: {method} returned {len(obs)} instructions for {n} envs")
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
            env_id = int(np.argwhere(~np.isfinite(state))[0][0])
            raise EnvError(f"env {env!r}: {method} returned a state that is not finite in env {env_id}")
    return obs.contiguous()


def checked_result(env: str, info: EnvInfo, result: ChunkResult, num_envs: int, width: int) -> ChunkResult:
    """Return the result of `width` actions in `num_envs` envs, with a contiguous observation. Raises EnvError."""
    obs = checked_observation(env, info, result.obs, num_envs, "chunk_step")
    sizes = {"N": num_envs, "C": width, "A": info.action_dim}
    for field in result_fields(info):
        array = read_field(result, field)
        if array is not None or not field.optional:
            _check_array(env, array, shape_of(field.dims.split(), sizes), field.dtype, field.name)
    if unknown := result.extras.keys() - info.extras.keys():
        raise EnvError(
            f"env {env!r}: chunk_step reports {', '.join(sorted(unknown))} in ChunkResult.extras; its info has to "
            f"declare their dimensions (EnvInfo.extras), which are {dict(info.extras)}"
        )
    _check_takeovers(env, info, result)
    for name, array in result.extras.items():
        if not np.isfinite(to_numpy(array)).all():
            raise EnvError(f"env {env!r}: {name} of ChunkResult.extras has NaN or inf, which no loss can use")
    rewards = to_numpy(result.rewards)
    if not np.isfinite(rewards).all():
        env_id, step = (int(i) for i in np.argwhere(~np.isfinite(rewards))[0])
        raise EnvError(f"env {env!r} returned the reward {rewards[env_id, step]} in env {env_id}, action {step}")
    return evolve(result, obs=obs)


def checked_actions(env: str, info: EnvInfo, actions: Any, env_ids: Array, chunk: int) -> Array:
    """Return the actions as float32 [R, C, A], clipped to bounds that rounding exceeds. Raises EnvError."""
    actions = np.asarray(to_numpy(actions), np.float32)
    low, high = np.asarray(info.action_low, np.float32), np.asarray(info.action_high, np.float32)
    expected = (len(env_ids), chunk, len(low))
    if actions.shape != expected:
        raise EnvError(f"actions for env {env!r} have shape {actions.shape}, expected {expected} (envs, chunk, dims)")
    outside = ~((actions >= low - BOUND_TOLERANCE) & (actions <= high + BOUND_TOLERANCE))
    if outside.any():
        index, step, dim = (int(i) for i in np.argwhere(outside)[0])
        raise EnvError(
            f"the policy chose {actions[index, step, dim]:g} in dimension {dim} (env {int(env_ids[index])}, action "
            f"{step} of the chunk), outside of the bounds [{low[dim]:g}, {high[dim]:g}] of env {env!r}; check that the "
            f"checkpoint's action statistics (unnorm_key) belong to this simulator"
        )
    clipped: Array = np.clip(actions, low, high)
    return clipped


def _check_takeovers(env: str, info: EnvInfo, result: ChunkResult) -> None:
    """Check who chose the actions of a result. Raises EnvError."""
    if not info.takeovers:
        if result.source is not None or result.executed_actions is not None:
            raise EnvError(
                f"env {env!r} reports who chose its actions; its info has to say so (EnvInfo(takeovers=True))"
            )
        return
    source = to_numpy(result.source)
    if unknown := set(np.unique(source).tolist()) - set(ActionSource):
        raise EnvError(f"env {env!r}: source {min(unknown)} is none of ActionSource, {[s.value for s in ActionSource]}")
    others = (source != ActionSource.POLICY) & to_numpy(result.executed)
    if not np.isfinite(to_numpy(result.executed_actions)[others]).all():
        raise EnvError(f"env {env!r} executed an action of another source than the policy that is not finite")


def not_deterministic(env: str, start: EpisodeRequest, chunks: str, rewards: str) -> EnvError:
    """Return the error for an episode that differs in a replay: `chunks` says which, `rewards` which rewards."""
    return EnvError(
        f"env {env!r} is not deterministic: {chunks} of an episode (state {start.state.id} of task "
        f"{start.state.task!r}), executed again from the same state and seed, ended it or rewarded {rewards}; its info "
        f"has to say so (EnvInfo(deterministic=False)): then streams of auto_reset restart where they cannot continue"
    )


def _check_array(env: str, array: Any, shape: tuple[int, ...], dtype: str, what: str) -> None:
    if not hasattr(array, "shape"):
        raise EnvError(f"env {env!r}: {what} is {array!r:.80}, expected {dtype} {shape}")
    if tuple(array.shape) != shape:
        raise EnvError(f"env {env!r}: {what} has shape {tuple(array.shape)}, expected {shape}")
    actual_dtype = str(array.dtype).removeprefix("torch.")
    if actual_dtype != dtype:
        raise EnvError(f"env {env!r}: {what} is {actual_dtype}, expected {dtype}; convert it in the simulator's plugin")
