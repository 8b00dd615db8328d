"""Public test doubles: a simulator that ends exactly where a test tells it to, and the plugins `scripted` and `linear`.

`spec.plugins: [vla_rl.testing.scripted]` makes both available to a spec: an environment and a policy so small
that a runtime, an algorithm or a placement is tested in seconds and without their noise. Imports NumPy only.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from attrs import asdict, frozen

from vla_rl.core.capabilities import Offloadable
from vla_rl.core.contexts import EnvContext, ModelContext
from vla_rl.core.declarations import EnvPlugin, ModelPlugin
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import generator
from vla_rl.core.types import (
    Array,
    ChunkResult,
    EnvInfo,
    Observation,
    ResetState,
    TaskInfo,
    at_last_action,
    to_numpy,
)
from vla_rl.testing.latency import Latency, wait_for_slowest

Outcome = Literal["success", "failure", "truncated"]
End = tuple[int, Outcome]
"""(step, outcome): the episode's `step`-th action, counted from 1, ends it that way."""
Ends = Mapping[Any, End] | Callable[[int], End | None]
Fault = Literal["none", "raise", "nan", "shape", "exit", "hang"]

NEVER = 2**31


class SimulatorFault(RuntimeError):
    """The failure that `ScriptedEnv(fault="raise")` was asked for."""


@frozen(kw_only=True, eq=False)
class StampedFrame:
    """Content of a stamped image, int64 [N] each: the run's env, its resets before this one, steps, state."""

    env: Array
    episode: Array
    step: Array
    state: Array


def read_stamp(obs: Observation) -> StampedFrame:
    """Read the stamp of a `ScriptedEnv(stamp=True)` observation: where each env was when the image was taken."""
    pixels = to_numpy(obs.images["main"])[:, 0, :4].astype(np.int64)
    numbers = pixels[..., 0] + 256 * pixels[..., 1] + 65536 * pixels[..., 2]
    return StampedFrame(env=numbers[:, 0], episode=numbers[:, 1], step=numbers[:, 2], state=numbers[:, 3])


class ScriptedEnv(SimEnv, Offloadable[Sequence[Array]]):
    """A simulator whose episodes end at prescribed steps, with observations that say where they are.

    Args:
        num_envs: N.
        ends: state id -> (step, outcome), as a mapping or a function; a mapping may also have (env, episode) keys,
            which win. Steps count from 1; a state without an entry (or None) never ends by itself.
            Default: something to learn. The episode ends at step `length`, with success if the first dimension of its
            actions, summed, has the sign of the first number of the state.
        holds: the success predicate stays true after the end; False: true at that one action only.
        stamp: write (env, episode, step, state) into the first four pixels, see `read_stamp`. Then observations are not
            a function of state and step alone.
        settings: the other ones of `ScriptedConfig`.
    """

    def __init__(
        self,
        num_envs: int,
        ends: Ends | None = None,
        *,
        chunk: int = 1,
        first_env: int = 0,
        holds: bool = True,
        stamp: bool = True,
        **settings: Any,
    ) -> None:
        config = self._config = ScriptedConfig(stamp=stamp, **settings)
        if config.image < 4:
            raise ValueError(f"image is {config.image} px; the stamp needs at least 4")
        self.num_envs = num_envs
        self.info = EnvInfo(
            cameras={"main": (config.image, config.image)},
            state_dim=2,
            action_low=(-1.0,) * config.action_dim,
            action_high=(1.0,) * config.action_dim,
            tasks=tuple(
                TaskInfo(name=f"task-{i}", instruction=f"follow the sign, {i}", max_steps=config.max_steps)
                for i in range(config.num_tasks)
            ),
        )
        self._ends = ends
        self._chunk = chunk
        self._first_env = first_env
        self._holds = holds
        drawn = num_envs if config.independent_envs else 1
        latency = config.latency_s, config.latency_sigma
        self._latencies = [Latency(*latency, seed=1 + first_env + i) for i in range(drawn)]
        self._calls = 0
        self.seeds = np.zeros(num_envs, np.int64)
        """Seed of the last reset of each env."""
        self._state = np.zeros(num_envs, np.int64)
        self._episode = np.full(num_envs, -1, np.int64)
        self._step = np.zeros(num_envs, np.int64)
        self._end = np.full(num_envs, NEVER, np.int64)
        self._outcome = np.full(num_envs, "never", "U9")
        self._push = np.zeros(num_envs, np.float32)

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        count = self._config.num_states
        first = {"train": 0, "eval": count}[split]
        return tuple(ResetState(id=i, task=self._find_task(i).name) for i in range(first, first + count))

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        env_ids = to_numpy(env_ids)
        self._state[env_ids], self.seeds[env_ids] = to_numpy(state_ids), to_numpy(seed)
        self._episode[env_ids] += 1
        self._step[env_ids] = 0
        self._push[env_ids] = 0.0
        for env_id in env_ids:
            step, outcome = self._prescribed_end(int(env_id)) or (NEVER, "never")
            self._end[env_id] = step
            self._outcome[env_id] = outcome
        return self._make_observation(env_ids)

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        actions, running = to_numpy(actions), to_numpy(active).copy()
        playing = np.flatnonzero(running) if self._config.independent_envs else [0]
        wait_for_slowest(self._latencies[env_id] for env_id in playing)
        shape = actions.shape[:2]
        rewards = np.zeros(shape, np.float32)
        terminated, truncated, executed, succeeded = (np.zeros(shape, bool) for _ in range(4))
        for c in range(shape[1]):
            executed[:, c] = running
            self._step[running] += 1
            self._push[running] += actions[running, c, 0]
            ended = running & (self._step == self._end)
            won = (self._outcome == "success") | ((self._outcome == "sign") & (self._push * self._target_signs() > 0))
            terminated[:, c] = ended & (self._outcome != "truncated")
            truncated[:, c] = ended & (self._outcome == "truncated")
            past = self._step >= self._end if self._holds else self._step == self._end
            succeeded[:, c] = running & won & past
            rewards[:, c] = self._config.step_reward * running + (ended & won)
            if stop_at_end:
                running &= ~ended
        obs = self._make_observation(np.arange(self.num_envs))
        self._calls += 1
        return ChunkResult(
            obs=obs if self._calls <= self._config.fault_at else self._break_observation(obs),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            executed=executed,
            success=at_last_action(succeeded, executed),
            succeeded=succeeded,
        )

    def expert_chunk(self) -> Array:
        chunk = np.zeros((self.num_envs, self._chunk, self.info.action_dim), np.float32)
        chunk[:, :, 0] = 0.5 * self._target_signs()[:, None]
        return chunk

    def snapshot(self) -> Sequence[Array]:
        return [array.copy() for array in self._saved_arrays()]

    def restore(self, snapshot: Sequence[Array]) -> None:
        for array, saved in zip(self._saved_arrays(), snapshot, strict=True):
            array[...] = saved

    def _saved_arrays(self) -> tuple[Array, ...]:
        return self.seeds, self._state, self._episode, self._step, self._end, self._outcome, self._push

    def _find_task(self, state: int) -> TaskInfo:
        return self.info.tasks[state % len(self.info.tasks)]

    def _target_signs(self) -> Array:
        return np.where(self._state // len(self.info.tasks) % 2 == 0, np.float32(1), np.float32(-1))

    def _prescribed_end(self, env_id: int) -> tuple[int, str] | None:
        state = int(self._state[env_id])
        if self._ends is None:
            return self._length_of(state), "sign"
        if isinstance(self._ends, Mapping):
            return self._ends.get((self._first_env + env_id, int(self._episode[env_id])), self._ends.get(state))
        return self._ends(state)

    def _length_of(self, state: int) -> int:
        sigma = self._config.length_sigma
        draw = generator(0, "scripted/length", state).standard_normal() if sigma else 0.0
        return max(1, round(self._config.length * math.exp(sigma * draw - sigma**2 / 2)))

    def _make_observation(self, env_ids: Array) -> Observation:
        image = np.full((len(env_ids), self._config.image, self._config.image, 3), 128, np.uint8)
        step = self._step[env_ids]
        image[:, 1:, :, 0] = (step * 16 % 256)[:, None, None]
        image[:, 1:, :, 1] = (self._state[env_ids] % 256)[:, None, None]
        if self._config.stamp:
            numbers = np.stack([self._first_env + env_ids, self._episode[env_ids], step, self._state[env_ids]], 1)
            image[:, 0, :4] = np.stack([numbers >> shift & 255 for shift in (0, 8, 16)], -1)
        limit = self.info.tasks[0].max_steps
        return Observation(
            images={"main": image},
            instructions=tuple(self._find_task(int(s)).instruction for s in self._state[env_ids]),
            state=np.stack([self._target_signs()[env_ids], step / limit], 1).astype(np.float32),
        )

    def _break_observation(self, obs: Observation) -> Observation:
        if self._config.fault == "raise":
            raise SimulatorFault(f"scripted fault in chunk_step {self._calls - 1}")
        if self._config.fault == "exit":
            os._exit(1)
        if self._config.fault == "hang":
            time.sleep(3600)
        images, state = obs.images, to_numpy(obs.state)
        if self._config.fault == "nan":
            state = np.full_like(state, np.nan)
        if self._config.fault == "shape":
            images = {name: image[:, 1:] for name, image in obs.images.items()}
        return Observation(images=images, instructions=obs.instructions, state=state)


@frozen(kw_only=True)
class ScriptedConfig:
    length: int = 4
    """Step at which an episode ends; with length_sigma, in the mean."""
    length_sigma: float = 0.0
    """Spread of that over states, as the standard deviation of its logarithm."""
    max_steps: int = 8
    """Step limit of the tasks."""
    num_states: int = 64
    """Initial states of each split."""
    num_tasks: int = 2
    """Tasks; they differ in name only."""
    action_dim: int = 2
    """A."""
    image: int = 8
    """Side of the camera's image in pixels, at least 4."""
    step_reward: float = 0.0
    """Reward of every executed action, added to the 1.0 of a success."""
    stamp: bool = False
    """Write env, episode, step and state into the first pixels."""
    latency_s: float = 0.0
    """Sleep in each chunk step, seconds."""
    latency_sigma: float = 0.0
    """Spread of that, as the standard deviation of its logarithm."""
    independent_envs: bool = False
    """Envs are separate simulators: some can step while others wait, each takes its own time, and a call as long as
    its slowest env."""
    fault: Fault = "none"
    """Misbehaviour from the `fault_at`-th chunk step on: raise `SimulatorFault`, NaN in the state, a camera of another
    shape, end the process, or sleep for an hour."""
    fault_at: int = 0
    """Chunk steps before the fault."""


@frozen(kw_only=True)
class LinearConfig:
    bins: int = 8
    """Values an action dimension can take, 2 to 256."""
    checkpoint: str | None = None
    """Folder written by `save`; None starts from small random weights."""
    latency_s: float = 0.0
    """Sleep in each `sample_chunk`, seconds."""
    latency_sigma: float = 0.0
    """Spread of that, as the standard deviation of its logarithm."""
    latency_env_s: float = 0.0
    """Sleep there for each row of the batch besides."""
    learn_latency_s: float = 0.0
    """Sleep in each `chunk_log_probs`, seconds."""
    sample_latency_s: float = 0.0
    """Sleep in it for each sample, seconds."""


def _build_env(config: ScriptedConfig, context: EnvContext) -> ScriptedEnv:
    return ScriptedEnv(context.num_envs, chunk=context.chunk, first_env=context.first_env, **asdict(config))


def _build_model(config: LinearConfig, context: ModelContext) -> Any:
    from vla_rl.testing.linear import LinearModel

    return LinearModel(
        context.env,
        context.chunk,
        bins=config.bins,
        seed=context.seed,
        values=context.values,
        device=context.device,
        temperature=context.temperature,
        checkpoint=config.checkpoint,
        latency=Latency(config.latency_s, config.latency_sigma, row_seconds=config.latency_env_s),
        learn_latency=Latency(config.learn_latency_s),
        sample_latency=Latency(config.sample_latency_s),
    )


vla_rl_plugins = {
    "env": {
        "scripted": EnvPlugin(
            config=ScriptedConfig,
            build=_build_env,
            summary="test double: follow the sign of the state",
            expert=True,
        )
    },
    "model": {
        "linear": ModelPlugin(config=LinearConfig, build=_build_model, summary="test double: a linear policy over bins")
    },
}
