"""Episode bookkeeping around a SimEnv: resets, limits, masks, groups, fixed states, seeds and success statistics.

A simulator plugin writes `reset` and `chunk_step`; everything else that a rollout needs happens here, once.
Three modes (RLinf-VLA fig. 7; docs/algorithms.md):

| auto_reset | ignore_terminations | what counts |
| off | false | actions up to and including the one that ends the episode; the row then waits for the others |
| immediate, deferred | false | every action of every episode; a row that ended starts anew with the next chunk |
| immediate, deferred | true | every action; episodes end at the step limit only |

`immediate` drops the rest of a chunk after an end, `deferred` executes it; either way it is not valid.

A row that broke (`SimEnv.faults`) plays its episode again from the start, with the same random numbers; what it had
done of it is not valid. So a fault costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Literal

import numpy as np
from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import ChunkResult, Episode, Observation, ResetState, to_numpy

Array = np.ndarray[Any, Any]
EPISODES_PER_STEP = 1 << 20  # an episode's number is step * this + its index within the rollout
BOUND_TOLERANCE = 1e-4


class EnvError(UserError):
    """A simulator broke its contract, or was given what it cannot take."""


@frozen(kw_only=True)
class Start:
    """What a row plays next. `None` in its place: the row stays idle."""

    state: ResetState
    row: int
    """Keys the episode's randomness, together with `episode`: the row's number in the run."""
    episode: int
    record: bool = False
    """Keep the frames of this episode."""


@frozen(kw_only=True, eq=False)
class Request:
    """What a policy is asked to do for one lane: act on `obs`, value `final`."""

    positions: Array
    """int64 [R]: lane rows that want a chunk; empty when the lane is done."""
    obs: Observation | None
    """Of these R rows."""
    rows: Array
    episodes: Array
    chunks: Array
    """int64 [R] each: key of the noise."""
    final_positions: Array
    """int64 [F]: lane rows whose last chunk needs a bootstrap value."""
    final: Observation | None
    """Of these F rows: final observation where truncated, next observation at the end of the rollout."""
    done: bool
    """Nothing more to act on in this round."""


class Episodes:
    """Runs the rows of one lane. `begin`, then `step` with the actions of each request, until the request is done."""

    def __init__(
        self,
        env: SimEnv,
        *,
        name: str,
        seed: int,
        chunk: int,
        max_steps: int | None = None,
        auto_reset: Literal["off", "immediate", "deferred"] = "off",
        ignore_terminations: bool = False,
        reward: Literal["raw", "relative"] = "raw",
        reward_coef: float = 1.0,
        bootstrap: bool = False,
        on_fault: Callable[[str], None] = lambda text: None,
    ):
        """`on_fault` hears what broke; it may raise to stop."""
        self.on_fault = on_fault
        self.env, self.name, self.seed, self.chunk = env, name, seed, chunk
        self.auto_reset, self.ignore_terminations, self.bootstrap = auto_reset, ignore_terminations, bootstrap
        self.reward, self.reward_coef = reward, reward_coef
        self.limits = {task.name: max_steps or task.max_steps for task in env.info.tasks}
        self.instructions = {task.name: task.instruction for task in env.info.tasks}
        self.low = np.asarray(env.info.action_low, np.float32)
        self.high = np.asarray(env.info.action_high, np.float32)
        self.seconds = 0.0
        self.env_steps = 0

    # ---------------------------------------------------------------------------------------------- protocol

    def begin(self, starts: Sequence[Start | None], chunk_steps: int | None, next_start: Any) -> Request:
        """Reset the rows and ask for the first chunks.

        Args:
            starts: one a row; None leaves it idle for the whole round.
            chunk_steps: length of the rollout with auto_reset; None: until every row has ended.
            next_start: with auto_reset, (lane row, index of the episode within the rollout) -> Start.
        """
        n = self.env.num_envs
        self.starts: list[Start | None] = list(starts)
        self.chunk_steps, self.next_start = chunk_steps, next_start
        self.active = np.array([s is not None for s in starts], dtype=bool)
        self.count = np.zeros(n, np.int64)  # valid steps of the running episode
        self.chunks = np.zeros(n, np.int64)  # chunk steps of the running episode
        self.index = np.zeros(n, np.int64)  # episode within the rollout
        self.begun = np.zeros(n, np.int64)  # record in which the running episode began
        self.total = np.zeros(n, np.float64)
        self.last_reward = np.zeros(n, np.float32)
        self.once = np.zeros(n, bool)
        self.records: list[dict[str, Array]] = []
        self.finished: list[tuple[int, Episode]] = []
        self.frames: dict[int, list[dict[str, Array]]] = {}
        self.recorded: dict[tuple[int, int], dict[str, Array]] = {}
        rows = np.flatnonzero(self.active)
        if len(rows):
            self.obs = self._reset(rows)
        self.obs_rows = rows
        return self._request(np.zeros(0, np.int64), None)

    def step(self, actions: Array) -> Request:
        """Execute float [R, C, A], aligned with the last request's `positions`, and ask for the next chunks."""
        if not self.active.any():
            return self._request(np.zeros(0, np.int64), None)
        rows = np.flatnonzero(self.active)
        remaining = np.array([self.limits[self._task(int(r))] - self.count[r] for r in rows])
        width = int(min(self.chunk, remaining.max()))
        result = self._chunk_step(rows, self._checked_actions(actions, rows)[:, :width], width)
        broken = self._broken()
        record, ends = self._account(rows, remaining, result, broken)
        self.records.append(record)
        self._take_back(broken)

        last = self.chunk_steps is not None and len(self.records) >= self.chunk_steps
        self._keep_frames(rows, result.obs)
        unbroken = np.setdiff1d(rows, broken)
        cut = np.array([r for r in unbroken if record["truncated"][r].any() or (last and not ends[r])], np.int64)
        final = result.obs.take(cut) if self.bootstrap and len(cut) else None
        over = np.flatnonzero(ends)
        for row in over:
            self._finish(int(row), record)
        self.obs, self.obs_rows = result.obs, np.arange(self.env.num_envs)
        if last:
            self.active[:] = False
        elif self.auto_reset == "off":
            self.active[over] = False
            self._renew(broken)
        else:
            self.index[over] += 1
            for row in over:
                self.starts[int(row)] = self.next_start(int(row), int(self.index[row]))
            self._renew(np.union1d(over, broken))
        return self._request(cut if final is not None else np.zeros(0, np.int64), final)

    def light(self) -> dict[str, Array]:
        """The lane's records of this round, time-major: rewards, terminated, truncated, valid [T, N, C]; nothing of a
        lane that stayed idle."""
        keys = self.records[0] if self.records else ()
        return {key: np.stack([record[key] for record in self.records]) for key in keys}

    # --------------------------------------------------------------------------------------------- simulator

    def _reset(self, rows: Array) -> Observation:
        starts = [self.starts[int(r)] for r in rows]
        ids = np.array([s.state.id for s in starts if s], np.int64)
        seeds = np.array([derived_seed(self.seed, "episode", s.row, s.episode) for s in starts if s], np.int64)
        before = perf_counter()
        obs = self.env.reset(rows, ids, seeds)
        self._broken()  # and repaired: these faults are only counted
        self.seconds += perf_counter() - before
        self._check_obs(obs, len(rows), "reset")
        for position, row in enumerate(rows):
            start = self.starts[int(row)]
            self.count[row] = self.chunks[row] = 0
            self.begun[row] = len(self.records)
            self.total[row], self.last_reward[row], self.once[row] = 0.0, 0.0, False
            if start and start.record:
                self.frames[int(row)] = [{name: to_numpy(image[position]) for name, image in obs.images.items()}]
        return obs

    def _chunk_step(self, rows: Array, actions: Array, width: int) -> ChunkResult:
        full = np.zeros((self.env.num_envs, width, len(self.low)), np.float32)
        full[rows] = actions
        stop = self.auto_reset != "deferred" and not self.ignore_terminations
        before = perf_counter()
        result = self.env.chunk_step(full, self.active.copy(), stop)
        self.seconds += perf_counter() - before
        self._check_obs(result.obs, self.env.num_envs, "chunk_step")
        want = (self.env.num_envs, width)
        for field in ("rewards", "terminated", "truncated", "executed"):
            self._check_shape(getattr(result, field), want, field)
        self._check_shape(result.success, want[:1], "success")
        rewards = to_numpy(result.rewards)
        if not np.isfinite(rewards).all():
            row, step = (int(i) for i in np.argwhere(~np.isfinite(rewards))[0])
            raise EnvError(f"env {self.name!r} returned the reward {rewards[row, step]} in row {row}, action {step}")
        return result

    def _check_obs(self, obs: Observation, n: int, method: str) -> None:
        if len(obs) != n:
            raise EnvError(f"env {self.name!r}: {method} returned {len(obs)} instructions for {n} rows")
        for camera, (height, width) in self.env.info.cameras.items():
            if camera not in obs.images:
                raise EnvError(
                    f"env {self.name!r}: {method} returned no image of camera {camera!r}; it returned: "
                    f"{', '.join(obs.images) or 'none'}"
                )
            self._check_shape(obs.images[camera], (n, height, width, 3), f"image {camera!r} of {method}")
        if self.env.info.state_dim:
            self._check_shape(obs.state, (n, self.env.info.state_dim), f"state of {method}")
            state = to_numpy(obs.state)
            if not np.isfinite(state).all():
                row = int(np.argwhere(~np.isfinite(state))[0][0])
                raise EnvError(f"env {self.name!r}: {method} returned a state that is not finite in row {row}")

    def _check_shape(self, array: Any, want: tuple[int, ...], what: str) -> None:
        got = None if array is None else tuple(array.shape)
        if got != want:
            raise EnvError(f"env {self.name!r}: {what} has shape {got}, expected {want}")

    def _checked_actions(self, actions: Array, rows: Array) -> Array:
        actions = np.asarray(to_numpy(actions), np.float32)
        want = (len(rows), self.chunk, len(self.low))
        if actions.shape != want:
            raise EnvError(
                f"actions for env {self.name!r} have shape {actions.shape}, expected {want} (rows, chunk, dims)"
            )
        outside = ~((actions >= self.low - BOUND_TOLERANCE) & (actions <= self.high + BOUND_TOLERANCE))
        if outside.any():
            row, step, dim = (int(i) for i in np.argwhere(outside)[0])
            raise EnvError(
                f"the policy chose {actions[row, step, dim]:g} in dimension {dim} (row {int(rows[row])}, action {step} "
                f"of the chunk), outside of the bounds [{self.low[dim]:g}, {self.high[dim]:g}] of env {self.name!r}; "
                f"check that the checkpoint's action statistics (unnorm_key) belong to this simulator"
            )
        clipped: Array = np.clip(actions, self.low, self.high)
        return clipped

    # -------------------------------------------------------------------------------------------- accounting

    def _account(
        self, rows: Array, remaining: Array, result: ChunkResult, broken: Array
    ) -> tuple[dict[str, Array], Array]:
        """Masks and rewards of one chunk step, padded to [N, C], and which rows' episodes ended."""
        n, width = self.env.num_envs, to_numpy(result.rewards).shape[1]
        rewards = to_numpy(result.rewards).astype(np.float32)
        terminated = to_numpy(result.terminated).astype(bool)
        truncated = to_numpy(result.truncated).astype(bool)
        executed = to_numpy(result.executed).astype(bool)
        executed[broken] = False
        idle = np.setdiff1d(np.flatnonzero(self.active & ~executed.any(1)), broken)
        if len(idle):
            raise EnvError(f"env {self.name!r}: chunk_step executed no action in the active rows {idle.tolist()}")
        self.env_steps += int(executed.sum())
        if self.ignore_terminations:
            terminated = np.zeros_like(terminated)
        limit = np.zeros((n, width), bool)
        within = remaining <= width
        limit[rows[within], remaining[within] - 1] = True
        truncated = (truncated | limit) & ~terminated
        ended = terminated | truncated
        valid = executed & ((np.cumsum(ended, 1) - ended) == 0)
        valid[~self.active] = False

        if self.reward == "relative":
            previous = np.concatenate([self.last_reward[:, None], rewards[:, :-1]], axis=1)
            self.last_reward = np.where(self.active, rewards[:, -1], self.last_reward)
            rewards = rewards - previous
        rewards = np.where(valid, rewards * np.float32(self.reward_coef), np.float32(0))
        terminated, truncated = terminated & valid, truncated & valid
        ended = terminated | truncated
        ends = ended.any(1)

        success = to_numpy(result.success).astype(bool)
        solved = (to_numpy(result.succeeded).astype(bool) & valid).any(1) if result.succeeded is not None else success
        self.once |= solved & self.active
        self.at_end = success
        if result.succeeded is not None:
            last_valid = np.maximum(valid.shape[1] - 1 - valid[:, ::-1].argmax(1), 0)
            self.at_end = to_numpy(result.succeeded).astype(bool)[np.arange(n), last_valid]
        self.count += valid.sum(1)
        self.chunks += self.active
        self.total += rewards.sum(1)

        def pad(array: Array) -> Array:
            return array if width == self.chunk else np.pad(array, ((0, 0), (0, self.chunk - width)))

        record = {
            "rewards": pad(rewards),
            "terminated": pad(terminated),
            "truncated": pad(truncated),
            "valid": pad(valid),
        }
        return record, ends

    def _finish(self, row: int, record: dict[str, Array]) -> None:
        start = self.starts[row]
        assert start is not None
        episode = Episode(
            row=start.row,
            episode=start.episode,
            task=start.state.task,
            state=start.state.id,
            steps=int(self.count[row]),
            total_reward=float(self.total[row]),
            success_once=bool(self.once[row]),
            success_at_end=bool(self.at_end[row]),
            truncated=bool(record["truncated"][row].any()),
        )
        self.finished.append((row, episode))
        if row in self.frames:
            frames = self.frames.pop(row)
            self.recorded[start.row, start.episode] = {c: np.stack([f[c] for f in frames]) for c in frames[0]}

    def _keep_frames(self, rows: Array, obs: Observation) -> None:
        for row in rows:
            if int(row) in self.frames:
                self.frames[int(row)].append({name: to_numpy(image[int(row)]) for name, image in obs.images.items()})

    def _renew(self, rows: Array) -> None:
        """Reset rows and put their new observation in the place of the one they have."""
        if not len(rows):
            return
        kept = np.flatnonzero(self.active & ~np.isin(np.arange(self.env.num_envs), rows))
        fresh = self._reset(rows)
        self.obs = Observation.concat([self.obs.take(kept), fresh]) if len(kept) else fresh
        self.obs_rows = np.concatenate([kept, rows])

    def _broken(self) -> Array:
        """Active rows that broke since the last call, int64, ascending."""
        faults = self.env.faults()
        for texts in faults.values():
            for text in texts:
                self.on_fault(text)
        return np.array(sorted(row for row in faults if self.active[row]), np.int64)

    def _take_back(self, broken: Array) -> None:
        """Make the running episode of these rows not valid, from its first record to the last."""
        for row in broken:
            for record in self.records[self.begun[row] :]:
                for array in record.values():
                    array[row] = 0

    def _task(self, row: int) -> str:
        start = self.starts[row]
        assert start is not None
        return start.state.task

    def _request(self, final_positions: Array, final: Observation | None) -> Request:
        positions = np.flatnonzero(self.active)
        place = {int(row): i for i, row in enumerate(self.obs_rows)}
        wanted = np.array([place[int(p)] for p in positions], np.int64)
        starts = [s for s in (self.starts[int(p)] for p in positions) if s]
        obs = None
        if len(positions):
            whole = np.array_equal(wanted, np.arange(len(self.obs)))
            obs = self.obs if whole else self.obs.take(wanted)
        return Request(
            positions=positions,
            obs=obs,
            rows=np.array([s.row for s in starts], np.int64),
            episodes=np.array([s.episode for s in starts], np.int64),
            chunks=self.chunks[positions],
            final_positions=final_positions,
            final=final,
            done=not len(positions),
        )
