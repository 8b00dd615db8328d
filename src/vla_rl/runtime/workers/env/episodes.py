"""Episode bookkeeping around a SimEnv: resets, limits, masks, fixed states, seeds and success statistics.

A simulator plugin implements `reset` and `chunk_step`; everything else that a rollout needs happens here, once. Envs
run tickets: an env that has finished one takes the next, and waits for no other env. There are three modes (RLinf-VLA
fig. 7; docs/algorithms.md):

| auto_reset | ignore_terminations | a ticket is |
| off | false | an episode: the actions up to and including the one that ends it |
| immediate, deferred | false | a fixed number of chunk steps: every action; a new episode starts with the next chunk |
| immediate, deferred | true | a fixed number of chunk steps: every action; episodes end at the step limit only |

`immediate` drops the rest of a chunk after an end, `deferred` executes it; either way it is not valid.

With auto_reset a ticket is a segment of its env's persistent stream: it continues where the stream's last ticket ended.
Where the env is no longer at that point (an evaluation ran on it, the run was resumed, or the worker is another one),
it is reset and the actions of the running episode are executed again, without drawing new ones.

An env that broke (`SimEnv.faults`) runs its episode again with the same random numbers, from the start, or from where
its ticket continued it; its records of the failed attempt are dropped. So a fault costs time and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Literal

import numpy as np
from attrs import evolve

from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import derived_seed
from vla_rl.core.types import Array, ChunkResult, Episode, Observation, to_numpy
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest, StepRequest
from vla_rl.runtime.workers.env.checked import (
    checked_actions,
    checked_observation,
    checked_result,
    not_deterministic,
)
from vla_rl.runtime.workers.env.observer import RolloutObserver
from vla_rl.runtime.workers.env.one_by_one import one_by_one
from vla_rl.runtime.workers.env.recording import EpisodeRecorder, RecordingStore
from vla_rl.runtime.workers.env.statistics import EpisodeStatistics
from vla_rl.toolkit.data.recording import RecordSettings

NO_ENVS = np.zeros(0, np.int64)


class Episodes:
    """Runs the envs of one lane: call `step` with tickets, then with the actions that each request asks for.

    Comments call an env of the lane an env, as it is an env of the arrays here.
    """

    def __init__(
        self,
        env: SimEnv,
        *,
        name: str,
        seed: int,
        chunk: int,
        first_env: int = 0,
        max_steps: int | None = None,
        auto_reset: Literal["off", "immediate", "deferred"] = "off",
        chunk_steps: int | None = None,
        draw: Callable[[EpisodeRequest, int], EpisodeRequest] | None = None,
        ignore_terminations: bool = False,
        reward: Literal["raw", "relative"] = "raw",
        reward_coef: float = 1.0,
        bootstrap: bool = False,
        camera: str | None = None,
        watch: RolloutObserver | None = None,
        on_fault: Callable[[str], None] = lambda text: None,
        takes: EpisodeRecorder | None = None,
    ):
        """Wrap a simulator.

        Args:
            first_env: index in the run of the lane's first env.
            chunk_steps: chunk steps of a ticket, with auto_reset.
            draw: (ticket, e) -> its episode e, from a reset state of its own, with auto_reset.
            camera: camera whose frames are kept of an episode that keeps frames; None: all cameras.
            watch: observer of all that the envs see and do.
            on_fault: called with the text of each fault; it may raise to stop.
            takes: recorder of episodes as data.
        """
        self.on_fault, self.watch = on_fault, watch
        self.env, self.name, self.seed, self.chunk, self.first_env = env, name, seed, chunk, first_env
        self.bootstrap, self.stop_at_end = bootstrap, auto_reset != "deferred" and not ignore_terminations
        self.chunk_steps, self.draw = chunk_steps, draw
        self.takes = takes or EpisodeRecorder(env.info, RecordSettings(), RecordingStore())
        self.broke: dict[int, Sequence[str]] = {}  # envs that broke within the current chunk, and their faults
        self.cameras = tuple(env.info.cameras) if camera is None else (camera,)
        self.limits = {task.name: max_steps or task.max_steps for task in env.info.tasks}
        self.low = np.asarray(env.info.action_low, np.float32)
        self.high = np.asarray(env.info.action_high, np.float32)
        self.env_ids = env.num_envs
        self.accounts = EpisodeStatistics(
            self.env_ids,
            name=name,
            chunk=chunk,
            ignore_terminations=ignore_terminations,
            reward=reward,
            reward_coef=reward_coef,
        )
        n = self.env_ids
        self.starts: list[EpisodeRequest | None] = [None] * n  # request of the running episode, or of the last one
        self.identity = np.zeros((n, 4), np.int64)  # of that episode: number, key, episode and version
        self.limit = np.zeros(n, np.int64)  # step limit of that episode
        self.begun = np.zeros(n, np.int64)  # chunk step of the ticket in which that episode began, or was continued
        self.since: list[list[Array]] = [[] for _ in range(n)]  # executed chunks of a stream's running episode
        self.before = [0] * n  # how many of them were executed before the running ticket
        self.paid = [0.0] * n  # sum of the rewards of those
        self.going_on: dict[int, Observation] = {}  # observations of envs whose streams are in the middle of an episode
        self.clear()

    # ---------------------------------------------------------------------------------------------- protocol

    def clear(self) -> None:
        """Drop the running tickets. The scenes that the envs have loaded and streams between two tickets are kept."""
        self.waiting: deque[EpisodeRequest] = deque()
        self.takes.clear()
        self.active = np.zeros(self.env_ids, bool)
        # Of each env's running ticket: one record a chunk step; the arrays of a record are of all envs, [N, ...].
        self.records: list[list[dict[str, Array]]] = [[] for _ in range(self.env_ids)]
        self.ended: list[list[Episode]] = [[] for _ in range(self.env_ids)]  # episodes of the running ticket that ended
        self.frames: dict[int, list[dict[str, Array]]] = {}
        self.recorded: dict[int, dict[str, Array]] = {}
        self.obs_envs = NO_ENVS

    def leave(self) -> None:
        """Forget the positions of streams, because something else will run on the simulator."""
        self.going_on.clear()

    def step(self, actions: Array | None = None, tickets: Sequence[EpisodeRequest] = ()) -> StepRequest:
        """Execute actions, start tickets in free envs, and ask for the next chunks.

        Args:
            actions: float [R, C, A], aligned with the last request's `positions`.
            tickets: further tickets; those without a free env wait in the lane.
        """
        self.waiting.extend(tickets)
        self.seconds, self.env_steps, self.replayed, self.restarted = 0.0, 0, 0, 0
        if not self.active.any():
            self._renew(self._fill())
            return self._request()
        assert actions is not None
        env_ids, remaining = np.flatnonzero(self.active), self._remaining(self.active)
        chosen = np.zeros((self.env_ids, self.chunk, len(self.low)), np.float32)
        chosen[env_ids] = checked_actions(self.name, self.env.info, actions, env_ids, self.chunk)
        result = self._chunk_step(chosen[:, : min(self.chunk, int(remaining.max()))], self.active)
        broken = self._broken(self.active)
        record, ends, executed = self.accounts.add(self.active, remaining, result, broken)
        self.env_steps += executed
        for env_id in env_ids:
            self.records[env_id].append(record)
            if self._start(env_id).env_id is not None:
                self.since[env_id].append(chosen[env_id])
        moved = np.setdiff1d(env_ids, broken) if len(broken) else env_ids
        if self.watch is not None:
            self.watch.moved(moved, chosen, record, self.accounts.at_end, result.obs)
        retaken = [self._take_back(int(env_id)) for env_id in broken]
        self.takes.add(moved, chosen, result, record["valid"])

        last = ends if self.chunk_steps is None else np.array([len(r) == self.chunk_steps for r in self.records])
        self._keep_frames(env_ids, result.obs)
        cut = record["truncated"].any(1) | (last & ~ends)
        cut[broken] = False
        valued = np.flatnonzero(cut & self.active) if self.bootstrap else NO_ENVS
        valued_of = [self._start(env_id) for env_id in valued]
        final = self._counted(result.obs.take(valued), valued) if len(valued) else None
        for env_id in np.flatnonzero(ends):
            self._finish(int(env_id), record)
            if self.chunk_steps is not None:
                self._follow(int(env_id))
        over = np.flatnonzero(ends & ~last)
        finished = [self._hand_over(int(env_id), result.obs) for env_id in np.flatnonzero(last & self.active)]
        self.obs, self.obs_envs = result.obs, np.arange(self.env_ids)
        self._renew(np.concatenate([over, broken, self._fill()]))
        return self._request(valued_of, final, finished, retaken)

    def _fill(self) -> Array:
        """Start waiting tickets in free envs. Return these envs, int64."""
        filled = []
        for env_id in np.flatnonzero(~self.active):
            ticket = self._next_of(env_id)
            if ticket is None:
                continue
            self.waiting.remove(ticket)
            before, self.active[env_id] = self.starts[env_id], True
            self._play(env_id, ticket)
            self.records[env_id], self.ended[env_id], self.begun[env_id] = [], [], 0
            if before is None or before.number != ticket.follows:
                self.going_on.pop(int(env_id), None)
            self.since[env_id] = [] if ticket.actions is None else list(ticket.actions)
            self.before[env_id], self.paid[env_id] = len(self.since[env_id]), ticket.paid
            if ticket.env_id is not None and not self.since[env_id]:
                self._draw(env_id, ticket.episode)  # drawn with the task weights of this ticket
            filled.append(env_id)
        return np.array(filled, np.int64)

    def _next_of(self, env_id: Any) -> EpisodeRequest | None:
        """Return the next ticket for an env, preferably one of the task whose scene it has loaded."""
        before, own = self.starts[env_id], [t for t in self.waiting if t.env_id in (None, self.first_env + env_id)]
        like = (t for t in own if before is not None and t.state.task == before.state.task)
        return next(like, own[0] if own else None)

    def _follow(self, env_id: int) -> None:
        """Continue the env's ticket, or its stream, with another episode."""
        self._draw(env_id, self._start(env_id).episode + 1)
        self.since[env_id], self.before[env_id], self.paid[env_id] = [], 0, 0.0

    def _draw(self, env_id: Any, episode: int) -> None:
        assert self.draw is not None
        self._play(env_id, self.draw(self._start(env_id), episode))

    def _play(self, env_id: Any, start: EpisodeRequest) -> None:
        self.starts[env_id], self.limit[env_id] = start, self.limits[start.state.task]
        self.identity[env_id] = start.number, start.key, start.episode, start.version

    def _hand_over(self, env_id: int, obs: Observation) -> EnvTrajectory:
        """Return the finished ticket of an env, which is free then. `obs`: observations of all envs."""
        start, records, self.active[env_id] = self._start(env_id), self.records[env_id], False
        after, since = None, self.since[env_id]
        if start.env_id is not None:
            actions = np.stack(since) if since else np.zeros((0, self.chunk, len(self.low)), np.float32)
            after = evolve(start, actions=actions, paid=float(self.accounts.total[env_id]) if since else 0.0)
        if since:
            self.going_on[env_id] = obs.take(np.array([env_id]))
        return EnvTrajectory(
            number=start.number,
            light={key: np.stack([record[key][env_id] for record in records]) for key in records[0]},
            episodes=tuple(self.ended[env_id]),
            frames=self.recorded.pop(env_id, None),
            after=after,
            world=start.world,
        )

    # --------------------------------------------------------------------------------------------- simulator

    def _reset(self, env_ids: Array) -> Observation:
        """Reset envs to the beginning of their episodes. Return their observations."""
        starts = [self._start(env_id) for env_id in env_ids]
        ids = np.array([s.state.id for s in starts], np.int64)
        seeds = np.array([derived_seed(self.seed, "episode", s.key, s.episode) for s in starts], np.int64)
        before = perf_counter()
        obs = self.env.reset(env_ids, ids, seeds)
        self._broken(self.active)  # they are repaired already: these faults are only counted
        self.seconds += perf_counter() - before
        obs = checked_observation(self.name, self.env.info, obs, len(env_ids), "reset")
        if self.watch is not None:
            self.watch.began(env_ids, starts, seeds, obs)
        for position, (env_id, start) in enumerate(zip(env_ids, starts, strict=True)):
            self.accounts.open(env_id)
            self.begun[env_id] = len(self.records[env_id])
            self.takes.begin(int(env_id), start, obs, position)
            if start.record:
                self.frames[int(env_id)] = [{name: to_numpy(obs.images[name][position]) for name in self.cameras}]
        return obs

    def _chunk_step(self, actions: Array, active: Array) -> ChunkResult:
        """Execute actions float32 [N, C', A] in the active envs, bool [N]; both are of all envs."""
        before = perf_counter()
        if self.takes.wants_steps(active):
            result, self.broke = one_by_one(self.env, actions, active, self.stop_at_end, self.takes.see)
        else:
            result = self.env.chunk_step(actions, active.copy(), self.stop_at_end)
        self.seconds += perf_counter() - before
        return checked_result(self.name, self.env.info, result, self.env_ids, actions.shape[1])

    def _replay(self, env_ids: Array) -> Observation:
        """Reset to where running episodes are: execute their actions again after the envs' resets. Return their
        observations.
        """
        done = dict.fromkeys(env_ids.tolist(), 0)
        arrived: dict[int, Observation] = {}
        while left := [env_id for env_id in done if env_id not in arrived]:
            active, actions = (
                np.zeros(self.env_ids, bool),
                np.zeros((self.env_ids, self.chunk, len(self.low)), np.float32),
            )
            active[left] = True
            for env_id in left:
                actions[env_id] = self.since[env_id][done[env_id]]
            result = self._chunk_step(actions, active)
            broken = self._broken(active)
            _, ends, executed = self.accounts.add(active, self._remaining(active), result, broken)
            self.replayed += executed
            for env_id in set(left) - set(broken.tolist()):
                done[env_id] += 1
                last = done[env_id] == len(self.since[env_id])
                if ends[env_id] or (last and not np.isclose(self.accounts.total[env_id], self.paid[env_id])):
                    chunks = f"chunk {done[env_id]} of {len(self.since[env_id])}"
                    paid = f"{self.accounts.total[env_id]:g} in all instead of {self.paid[env_id]:g}"
                    raise not_deterministic(self.name, self._start(env_id), chunks, paid)
                if last:
                    arrived[env_id] = result.obs.take(np.array([env_id]))
            if len(broken):
                self._reset(broken)
                done.update(dict.fromkeys(broken.tolist(), 0))
        return Observation.concat([arrived[env_id] for env_id in env_ids.tolist()])

    # -------------------------------------------------------------------------------------------- accounting

    def _remaining(self, active: Array) -> Array:
        """Return the number of actions before the step limit, int64 [N]; 0 for envs that are not active."""
        return np.where(active, self.limit - self.accounts.steps, 0)

    def _finish(self, env_id: int, record: dict[str, Array]) -> None:
        self.ended[env_id].append(
            self.accounts.close(env_id, self._start(env_id), bool(record["truncated"][env_id].any()))
        )
        self.takes.end(env_id, self.ended[env_id][-1])
        if env_id in self.frames:
            frames = self.frames.pop(env_id)
            self.recorded[env_id] = {c: np.stack([f[c] for f in frames]) for c in frames[0]}

    def _keep_frames(self, env_ids: Array, obs: Observation) -> None:
        for env_id in self.frames.keys() & env_ids.tolist():
            self.frames[env_id].append({name: to_numpy(obs.images[name][env_id]) for name in self.cameras})

    def _renew(self, env_ids: Array) -> None:
        """Continue envs where their stream is, or else from a reset, and replace their observations by the ones from
        there.
        """
        if not len(env_ids):
            return
        env_ids = np.unique(env_ids)
        kept = np.flatnonzero(self.active & ~np.isin(np.arange(self.env_ids), env_ids))
        found = [(kept, self.obs.take(kept))] if len(kept) else []
        found += [
            (np.array([env_id]), self.going_on.pop(env_id)) for env_id in env_ids.tolist() if env_id in self.going_on
        ]
        found += self._set_up(np.setdiff1d(env_ids, [env_id for on, _ in found for env_id in on]))
        self.obs = Observation.concat([obs for _, obs in found])
        self.obs_envs = np.concatenate([of for of, _ in found])

    def _set_up(self, env_ids: Array) -> list[tuple[Array, Observation]]:
        """Reset envs, and replay the episodes that had begun before."""
        if not len(env_ids):
            return []
        for env_id in env_ids:
            if self.since[env_id] and not self.env.info.deterministic:
                self._follow(env_id)
                self.restarted += 1
        begun = np.array([bool(self.since[env_id]) for env_id in env_ids])
        obs = self._reset(env_ids)
        if not begun.any():
            return [(env_ids, obs)]
        return [(env_ids[~begun], obs.take(np.flatnonzero(~begun))), (env_ids[begun], self._replay(env_ids[begun]))]

    def _broken(self, active: Array) -> Array:
        """Return those of the active envs that broke since the last call, int64, ascending; report their faults."""
        faults, self.broke = {**self.broke, **self.env.faults()}, {}
        for env_id, texts in faults.items():
            self.going_on.pop(env_id, None)
            for text in texts:
                self.on_fault(text)
        return np.array(sorted(env_id for env_id in faults if active[env_id]), np.int64)

    def _take_back(self, env_id: int) -> tuple[int, int]:
        """Drop the ticket's records of the running episode. Return (ticket, number of its chunk steps that remain
        valid).
        """
        del self.records[env_id][self.begun[env_id] :], self.since[env_id][self.before[env_id] :]
        return self._start(env_id).number, int(self.begun[env_id])

    def _ending(self, env_ids: Array, played: Sequence[int]) -> int:
        """Return how many of these envs, with this many chunk steps each, certainly end their tickets with the next
        one.
        """
        if self.chunk_steps is not None:
            return sum(count + 1 == self.chunk_steps for count in played)
        return int(np.count_nonzero(self.limit[env_ids] - self.accounts.steps[env_ids] <= self.chunk))

    def _start(self, env_id: Any) -> EpisodeRequest:
        start: EpisodeRequest | None = self.starts[env_id]
        assert start is not None
        return start

    def _counted(self, obs: Observation, env_ids: Array) -> Observation:
        """Return the observation of these envs with the step counts of their episodes."""
        return evolve(obs, steps=self.accounts.steps[env_ids])

    def _request(
        self,
        valued: Sequence[EpisodeRequest] = (),
        final: Observation | None = None,
        finished: Sequence[EnvTrajectory] = (),
        again: Sequence[tuple[int, int]] = (),
    ) -> StepRequest:
        positions = np.flatnonzero(self.active)
        asking = np.empty((6, len(positions)), np.int64)
        asking[0], asking[[1, 2, 3, 5]] = positions, self.identity[positions].T
        asking[4] = self.accounts.chunks[positions]
        played = [len(self.records[env_id]) for env_id in positions.tolist()]
        obs = None
        if len(positions):
            whole = np.array_equal(positions, self.obs_envs)
            of = self.obs if whole else self.obs.take((positions[:, None] == self.obs_envs).argmax(1))
            obs = self._counted(of, positions)
        return StepRequest(
            asking=asking,
            obs=obs,
            ended=np.array([[s.number for s in valued], [s.version for s in valued]], np.int64),
            final=final,
            finished=tuple(finished),
            again=tuple(again),
            steps=sum(played),
            ending=self._ending(positions, played),
            waiting=len(self.waiting),
            seconds=self.seconds,
            env_steps=self.env_steps,
            replayed=self.replayed,
            restarted=self.restarted,
        )
