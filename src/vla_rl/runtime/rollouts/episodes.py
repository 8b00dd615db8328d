"""Episode bookkeeping around a SimEnv: resets, limits, masks, fixed states, seeds and success statistics.

A simulator plugin writes `reset` and `chunk_step`; everything else that a rollout needs happens here, once. Rows play
tickets: a row that is done with one takes the next, and waits for no other. Three modes (RLinf-VLA fig. 7;
docs/algorithms.md):

| auto_reset | ignore_terminations | a ticket is |
| off | false | an episode: the actions up to and including the one that ends it |
| immediate, deferred | false | so many chunk steps: every action; a new episode starts with the next chunk |
| immediate, deferred | true | so many chunk steps: every action; episodes end at the step limit only |

`immediate` drops the rest of a chunk after an end, `deferred` executes it; either way it is not valid.

A row that broke (`SimEnv.faults`) plays its episode again from the start, with the same random numbers; what it had
done of it is forgotten. So a fault costs time and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Literal

import numpy as np

from vla_rl.core.episodes import EnvError, Finished, Request, Start
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import ChunkResult, Episode, Observation, to_numpy

Array = np.ndarray[Any, Any]
BOUND_TOLERANCE = 1e-4
NO_ROWS = np.zeros(0, np.int64)


class Episodes:
    """Runs the rows of one lane: `step` with tickets, and then with the actions that each request asks for."""

    def __init__(
        self,
        env: SimEnv,
        *,
        name: str,
        seed: int,
        chunk: int,
        max_steps: int | None = None,
        auto_reset: Literal["off", "immediate", "deferred"] = "off",
        chunk_steps: int | None = None,
        following: Callable[[Start], Start] | None = None,
        ignore_terminations: bool = False,
        reward: Literal["raw", "relative"] = "raw",
        reward_coef: float = 1.0,
        bootstrap: bool = False,
        camera: str | None = None,
        on_fault: Callable[[str], None] = lambda text: None,
    ):
        """
        Args:
            chunk_steps: of a ticket, with auto_reset.
            following: with auto_reset, an episode of a ticket -> the one after it.
            camera: whose frames are kept of an episode that is recorded; None: of all.
            on_fault: hears what broke; it may raise to stop.
        """
        self.on_fault = on_fault
        self.env, self.name, self.seed, self.chunk = env, name, seed, chunk
        self.auto_reset, self.ignore_terminations, self.bootstrap = auto_reset, ignore_terminations, bootstrap
        self.chunk_steps, self.following = chunk_steps, following
        self.reward, self.reward_coef = reward, reward_coef
        self.cameras = tuple(env.info.cameras) if camera is None else (camera,)
        self.limits = {task.name: max_steps or task.max_steps for task in env.info.tasks}
        self.instructions = {task.name: task.instruction for task in env.info.tasks}
        self.low = np.asarray(env.info.action_low, np.float32)
        self.high = np.asarray(env.info.action_high, np.float32)
        self.rows = env.num_envs
        self.starts: list[Start | None] = [None] * self.rows  # of the running episode, or of the last one
        self.clear()

    # ---------------------------------------------------------------------------------------------- protocol

    def clear(self) -> None:
        """Forget what is being played, but not which scenes the rows have."""
        n = self.rows
        self.waiting: deque[Start] = deque()
        self.active = np.zeros(n, bool)
        self.count = np.zeros(n, np.int64)  # valid steps of the running episode
        self.chunks = np.zeros(n, np.int64)  # chunk steps of the running episode
        self.begun = np.zeros(n, np.int64)  # chunk step of the ticket in which it began
        self.total = np.zeros(n, np.float64)
        self.last_reward = np.zeros(n, np.float32)
        self.once = np.zeros(n, bool)
        self.records: list[list[dict[str, Array]]] = [[] for _ in range(n)]  # of the running ticket
        self.ended: list[list[Episode]] = [[] for _ in range(n)]  # of its episodes
        self.frames: dict[int, list[dict[str, Array]]] = {}
        self.recorded: dict[int, dict[str, Array]] = {}
        self.obs_rows = NO_ROWS

    def step(self, actions: Array | None = None, tickets: Sequence[Start] = ()) -> Request:
        """Execute float [R, C, A], aligned with the last request's `positions`; let rows that are free begin with
        tickets, of which others wait in the lane; and ask for the next chunks."""
        self.waiting.extend(tickets)
        self.seconds, self.env_steps = 0.0, 0
        if not self.active.any():
            self._renew(self._fill())
            return self._request()
        assert actions is not None
        rows = np.flatnonzero(self.active)
        remaining = np.array([self.limits[self._start(row).state.task] - self.count[row] for row in rows])
        width = int(min(self.chunk, remaining.max()))
        result = self._chunk_step(rows, self._checked_actions(actions, rows)[:, :width], width)
        broken = self._broken()
        record, ends = self._account(rows, remaining, result, broken)
        for row in rows:
            self.records[row].append({key: array[row] for key, array in record.items()})
        retaken = [self._take_back(int(row)) for row in broken]

        last = ends if self.chunk_steps is None else np.array([len(r) == self.chunk_steps for r in self.records])
        self._keep_frames(rows, result.obs)
        cut = record["truncated"].any(1) | (last & ~ends)
        cut[broken] = False
        valued = np.flatnonzero(cut & self.active) if self.bootstrap else NO_ROWS
        valued_of = [self._start(row) for row in valued]
        for row in np.flatnonzero(ends):
            self._finish(int(row), record)
        over = np.flatnonzero(ends & ~last)
        finished = [self._hand_over(int(row)) for row in np.flatnonzero(last & self.active)]
        for row in over:
            assert self.following is not None
            self.starts[row] = self.following(self._start(row))
        self.obs, self.obs_rows = result.obs, np.arange(self.rows)
        self._renew(np.unique(np.concatenate([over, broken, self._fill()])))
        return self._request(valued_of, result.obs.take(valued) if len(valued) else None, finished, retaken)

    def _fill(self) -> Array:
        """Let free rows begin with waiting tickets, best one of the task whose scene the row has. -> these rows."""
        free = np.flatnonzero(~self.active)[: len(self.waiting)]
        for row in free:
            before = self.starts[row]
            own = (t for t in self.waiting if before is not None and t.state.task == before.state.task)
            ticket = next(own, self.waiting[0])
            self.waiting.remove(ticket)
            self.starts[row], self.active[row] = ticket, True
            self.records[row], self.ended[row] = [], []
        return free

    def _hand_over(self, row: int) -> Finished:
        """The ticket that a row is done with; the row is free then."""
        records, self.active[row] = self.records[row], False
        return Finished(
            number=self._start(row).number,
            light={key: np.stack([record[key] for record in records]) for key in records[0]},
            episodes=tuple(self.ended[row]),
            frames=self.recorded.pop(row, None),
        )

    # --------------------------------------------------------------------------------------------- simulator

    def _reset(self, rows: Array) -> Observation:
        starts = [self._start(row) for row in rows]
        ids = np.array([s.state.id for s in starts], np.int64)
        seeds = np.array([derived_seed(self.seed, "episode", s.number, s.episode) for s in starts], np.int64)
        before = perf_counter()
        obs = self.env.reset(rows, ids, seeds)
        self._broken()  # and repaired: these faults are only counted
        self.seconds += perf_counter() - before
        self._check_obs(obs, len(rows), "reset")
        for position, (row, start) in enumerate(zip(rows, starts, strict=True)):
            self.count[row] = self.chunks[row] = 0
            self.begun[row] = len(self.records[row])
            self.total[row], self.last_reward[row], self.once[row] = 0.0, 0.0, False
            if start.record:
                self.frames[int(row)] = [{name: to_numpy(obs.images[name][position]) for name in self.cameras}]
        return obs

    def _chunk_step(self, rows: Array, actions: Array, width: int) -> ChunkResult:
        full = np.zeros((self.rows, width, len(self.low)), np.float32)
        full[rows] = actions
        stop = self.auto_reset != "deferred" and not self.ignore_terminations
        before = perf_counter()
        result = self.env.chunk_step(full, self.active.copy(), stop)
        self.seconds += perf_counter() - before
        self._check_obs(result.obs, self.rows, "chunk_step")
        want = (self.rows, width)
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
        n, width = self.rows, to_numpy(result.rewards).shape[1]
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
        start = self._start(row)
        episode = Episode(
            number=start.number,
            episode=start.episode,
            task=start.state.task,
            state=start.state.id,
            steps=int(self.count[row]),
            total_reward=float(self.total[row]),
            success_once=bool(self.once[row]),
            success_at_end=bool(self.at_end[row]),
            truncated=bool(record["truncated"][row].any()),
        )
        self.ended[row].append(episode)
        if row in self.frames:
            frames = self.frames.pop(row)
            self.recorded[row] = {c: np.stack([f[c] for f in frames]) for c in frames[0]}

    def _keep_frames(self, rows: Array, obs: Observation) -> None:
        for row in rows:
            if int(row) in self.frames:
                self.frames[int(row)].append({name: to_numpy(obs.images[name][int(row)]) for name in self.cameras})

    def _renew(self, rows: Array) -> None:
        """Reset rows and put their new observation in the place of the one they have."""
        if not len(rows):
            return
        kept = np.flatnonzero(self.active & ~np.isin(np.arange(self.rows), rows))
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

    def _take_back(self, row: int) -> tuple[int, int]:
        """Forget the running episode. -> (ticket, chunk steps of it that stand)."""
        del self.records[row][self.begun[row] :]
        return self._start(row).number, int(self.begun[row])

    def _ends_next(self, row: Any) -> bool:
        """Whether a row's ticket surely ends with the next chunk."""
        if self.chunk_steps is not None:
            return len(self.records[row]) + 1 == self.chunk_steps
        left = self.limits[self._start(row).state.task] - self.count[row]
        return bool(left <= self.chunk)

    def _start(self, row: Any) -> Start:
        start: Start | None = self.starts[row]
        assert start is not None
        return start

    def _request(
        self,
        valued: Sequence[Start] = (),
        final: Observation | None = None,
        finished: Sequence[Finished] = (),
        again: Sequence[tuple[int, int]] = (),
    ) -> Request:
        positions = np.flatnonzero(self.active)
        place = {int(row): i for i, row in enumerate(self.obs_rows)}
        wanted = np.array([place[int(p)] for p in positions], np.int64)
        starts = [self._start(row) for row in positions]
        obs = None
        if len(positions):
            whole = np.array_equal(wanted, np.arange(len(self.obs)))
            obs = self.obs if whole else self.obs.take(wanted)
        return Request(
            positions=positions,
            obs=obs,
            numbers=np.array([s.number for s in starts], np.int64),
            episodes=np.array([s.episode for s in starts], np.int64),
            chunks=self.chunks[positions],
            versions=np.array([s.version for s in starts], np.int64),
            final_numbers=np.array([s.number for s in valued], np.int64),
            final_versions=np.array([s.version for s in valued], np.int64),
            final=final,
            finished=tuple(finished),
            again=tuple(again),
            ending=sum(map(self._ends_next, positions)),
            waiting=len(self.waiting),
            seconds=self.seconds,
            env_steps=self.env_steps,
        )
