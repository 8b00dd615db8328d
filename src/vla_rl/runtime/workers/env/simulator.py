"""The simulator of a lane, whose calls are checked and timed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from attrs import define, evolve

from vla_rl.core.fields import Field, arrange_fields, read_field
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.samples import result_fields
from vla_rl.core.types import ActionSource, Array, ChunkResult, EnvInfo, Observation, pick_rows, to_numpy
from vla_rl.runtime.comm.interfaces import CLOSE_S
from vla_rl.runtime.workers.env.checked import checked_actions, checked_observation, checked_result
from vla_rl.runtime.workers.env.episode_records import StepCounts
from vla_rl.runtime.workers.env.recording import EpisodeRecorder
from vla_rl.runtime.workers.env.reward_scorer import RewardScorer
from vla_rl.toolkit.processes import limit_time


@define(eq=False, slots=False)
class LaneSimulator:
    """The simulator of a lane of N envs. Seconds of its calls are added to `counts`."""

    env: SimEnv
    name: str
    """Name of the simulator, for errors."""
    chunk: int
    stop_at_end: bool
    """Whether the rest of a chunk is dropped after an end."""
    recorder: EpisodeRecorder
    """Recorder that may ask for the observation after every action."""
    counts: StepCounts
    scorer: RewardScorer | None = None
    """Teller of success and rewards; None: the simulator."""
    ignore_terminations: bool = False
    """Episodes continue after a termination."""

    def __attrs_post_init__(self) -> None:
        self.num_envs = self.env.num_envs
        self.low = np.asarray(self.info.action_low, np.float32)
        self.high = np.asarray(self.info.action_high, np.float32)
        self._faults: Mapping[int, Sequence[str]] = {}
        """Faults of the last chunk that `env.faults` no longer reports."""

    @property
    def info(self) -> EnvInfo:
        return self.env.info

    def no_actions(self) -> Array:
        """Return a chunk of zeros for each env, float32 [N, C, A]."""
        return np.zeros((self.num_envs, self.chunk, len(self.low)), np.float32)

    def all_actions(self, actions: Array, env_ids: Array) -> Array:
        """Return the actions of these envs, as [N, C, A] with zeros for the others. Raises EnvError."""
        of_all = self.no_actions()
        of_all[env_ids] = checked_actions(self.name, self.info, actions, env_ids, self.chunk)
        return of_all

    def reset_envs(self, env_ids: Array, state_ids: Array, seeds: Array) -> Observation:
        """Reset envs; arrays are int64 [R]. Return their observations. Raises EnvError."""
        if self.scorer is not None:
            self.scorer.before_reset(env_ids)
        before = perf_counter()
        obs = self.env.reset(env_ids, state_ids, seeds)
        self.counts.seconds += perf_counter() - before
        return checked_observation(self.name, self.info, obs, len(env_ids), "reset")

    def chunk_step(self, actions: Array, active: Array, remaining: Array) -> ChunkResult:
        """Execute actions float32 [N, C', A] in active envs, bool [N]; `remaining` to limits, int64 [N]. EnvError."""
        observers: list[Saw] = []
        if self.recorder.running and self.recorder.wants_steps(active):
            observers.append(self.recorder.add_observations)
        if (scorer := self.scorer) is not None:
            scorer.watch_observations(None)
            if scorer.model.watches and not self.info.chunk_is_one_motion:
                observers.append(lambda _, obs: scorer.watch_observations(obs))
        before = perf_counter()
        if observers:
            result, faults = one_by_one(self.env, actions, active, self.stop_at_end, observers)
            self._faults = faults
        else:
            result = self.env.chunk_step(actions, active.copy(), self.stop_at_end)
        self.counts.seconds += perf_counter() - before
        result = checked_result(self.name, self.info, result, self.num_envs, actions.shape[1])
        if scorer is not None:
            result = scorer.score_chunk(result, active, remaining, ignore_terminations=self.ignore_terminations)
        return result if result.source is None else _with_own_actions(result, actions)

    @property
    def is_deterministic(self) -> bool:
        """Return whether the same actions from the same reset give the same episode."""
        return self.info.deterministic and (self.scorer is None or self.scorer.model.deterministic)

    def take_faults(self) -> dict[int, Sequence[str]]:
        """Return the envs that broke since the last call, with the texts of their faults."""
        faults = {**self._faults, **self.env.faults()}
        self._faults = {}
        return faults


def _with_own_actions(result: ChunkResult, actions: Array) -> ChunkResult:
    """Return the result with the policy's actions (float32 [N, C, A]) where no other source chose an executed one."""
    executed = to_numpy(result.executed)
    source = np.where(executed, to_numpy(result.source), np.int8(ActionSource.POLICY))
    others = (source != ActionSource.POLICY)[..., None]
    return evolve(result, source=source, executed_actions=np.where(others, to_numpy(result.executed_actions), actions))


def close_env(env: SimEnv, name: str) -> str:
    """Close a simulator. Return what went wrong, in words; empty when nothing did."""
    try:
        with limit_time(CLOSE_S):
            env.close()
    except TimeoutError:
        return f"env {name!r}: close has not returned within {CLOSE_S:g} s; its end was not waited for"
    except BaseException as exc:  # SystemExit too: a finished run must not fail because of it
        where = traceback.extract_tb(exc.__traceback__)[-1]
        description = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
        return f"env {name!r}: close failed ({where.filename}:{where.lineno}): {description}"
    return ""


Saw = Callable[[Array, Observation], None]


def one_by_one(
    env: SimEnv, actions: Array, active: Array, stop_at_end: bool, observers: Sequence[Saw]
) -> tuple[ChunkResult, dict[int, Sequence[str]]]:
    """Return what `env.chunk_step` returns for the whole chunk, and the envs that broke with the texts of their faults.

    Args:
        observers: called after each action with the envs that executed it (int64) and the observation of all.
    """
    going, faults = active.copy(), dict[int, Sequence[str]]()
    last = np.zeros(len(active), np.int64)
    parts: list[ChunkResult] = []
    for i in range(actions.shape[1]):
        parts.append(part := env.chunk_step(actions[:, i : i + 1], going.copy(), stop_at_end))
        last[going] = i
        broken: Mapping[int, Sequence[str]] = env.faults()
        faults.update(broken)
        going &= to_numpy(part.executed)[:, 0].astype(bool)
        going[list(broken)] = False
        for saw in observers:
            saw(np.flatnonzero(going), part.obs)
        if stop_at_end:
            going &= ~(to_numpy(part.terminated) | to_numpy(part.truncated))[:, 0].astype(bool)
        if not going.any():
            break
    last[~active] = len(parts) - 1
    padding = actions.shape[1] - len(parts)

    ends = last * len(active) + np.arange(len(active))

    def stack_field(field: Field) -> Any:
        arrays = [read_field(part, field) for part in parts]
        if any(array is None for array in arrays):  # what is missing is named where results are checked
            return None
        if "C" not in field.dims.split():
            return pick_rows(np.concatenate([to_numpy(array) for array in arrays]), ends)
        columns = np.concatenate([to_numpy(array) for array in arrays], 1)
        return np.pad(columns, [(0, 0), (0, padding), *[(0, 0)] * (columns.ndim - 2)])

    result = ChunkResult(
        obs=parts[-1].obs if (last == last[0]).all() else Observation.concat([p.obs for p in parts]).take(ends),
        **arrange_fields(ChunkResult, {field.name: stack_field(field) for field in result_fields(env.info)}),
    )
    return result, faults
