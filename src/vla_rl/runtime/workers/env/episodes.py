"""Episode bookkeeping around a SimEnv: resets, limits, masks, fixed states, seeds and success statistics.

A simulator plugin implements `reset` and `chunk_step`; all else happens here, once. Envs run tickets: an env that has
finished one takes the next, and waits for none. There are three modes (RLinf-VLA fig. 7; docs/reference/algorithms.md):

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
An episode of an evaluation is given up where its reset state breaks envs again and again (`gives_up`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
from attrs import evolve

from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import derived_seeds
from vla_rl.core.types import Array, ChunkResult, Observation, ResetState
from vla_rl.runtime.messages.requests import EnvTrajectory, EpisodeRequest, StepRequest
from vla_rl.runtime.workers.env.auto_reset import StreamPositions, StreamReplay
from vla_rl.runtime.workers.env.episode_records import ACTIONS, EpisodeStatistics, RunningTrajectories, StepCounts
from vla_rl.runtime.workers.env.expert import LABELS, LaneExpert
from vla_rl.runtime.workers.env.recording import EpisodeRecorder, FrameRecorder
from vla_rl.runtime.workers.env.reward_scorer import RewardScorer
from vla_rl.runtime.workers.env.simulator import LaneSimulator
from vla_rl.runtime.workers.env.waiting_tickets import WaitingTickets
from vla_rl.toolkit.data.recording import RecordSettings

Bootstrap = Literal["none", "truncated", "ended"]

NO_ENVS = np.zeros(0, np.int64)
NO_IDENTITY = np.zeros((0, 4), np.int64)
NUMBER, VERSION = 0, 3
"""Columns of `Episodes.identity`."""


class RolloutObserver(Protocol):
    """Observer of all episodes of a lane; `world_model_recording.py` records them through it."""

    def on_reset(self, env_ids: Array, starts: Sequence[EpisodeRequest], seeds: Array, obs: Observation) -> None:
        """Take note that these envs (int64 [R]) were reset with these seeds (int64 [R]); `obs` is of these R."""

    def on_chunk(
        self, env_ids: Array, actions: Array, record: Mapping[str, Array], success: Array, obs: Observation
    ) -> None:
        """Take note that these envs (int64 [R]) executed a chunk.

        Args:
            actions: float32 [N, C, A] of all N envs, as they were asked for.
            record: masks [N, C], as `EpisodeStatistics.add_chunk` returns them.
            success: bool [N]: whether the last action solved the task.
            obs: observations of all envs after the chunk.
        """


class Episodes:
    """Runs the envs of one lane: call `step` with tickets, then with the actions that each request asks for.

    It decides which env runs which ticket and which episode. Its parts do the rest: `simulator` executes, `statistics`
    derives masks and rewards, `trajectories` and the recorders keep the results, `streams` and `replay` continue
    persistent env streams.
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
        bootstrap: Bootstrap = "none",
        camera: str | None = None,
        observers: Sequence[RolloutObserver] = (),
        on_fault: Callable[[str, ResetState | None], None] = lambda text, state: None,
        gives_up: Callable[[ResetState], bool] = lambda state: False,
        record: RecordSettings | None = None,
        scorer: RewardScorer | None = None,
        expert: LaneExpert | None = None,
    ):
        """Wrap a simulator.

        Args:
            first_env: index in the run of the lane's first env.
            chunk_steps: chunk steps of a ticket, with auto_reset.
            draw: (ticket, e) -> its episode e, from a separate reset state, with auto_reset.
            bootstrap: ends of episodes, apart from cut trajectories, whose final observations policies value.
            camera: camera whose frames are kept of an episode that keeps frames; None: all cameras.
            observers: observers of all that the envs see and do.
            on_fault: called with the text of each fault and the reset state of its episode; it may raise to stop.
            gives_up: whether to run no further episode from this reset state, which has broken envs.
            record: what to record of episodes that are recorded as data.
            scorer: judge of success and rewards; None: the simulator.
            expert: expert that labels each chunk step, and acts where a ticket says so; None: no expert.
        """
        num_envs = env.num_envs
        self.num_envs = num_envs
        self.seed = seed
        self.chunk = chunk
        self.first_env = first_env
        self.chunk_steps = chunk_steps
        self.draw = draw
        self.bootstrap = bootstrap
        self.observers = observers
        self.expert = expert
        self.step_limits = {task.name: max_steps or task.max_steps for task in env.info.tasks}
        self.recorder = EpisodeRecorder(env.info, record or RecordSettings())
        self.frames = FrameRecorder(tuple(env.info.cameras) if camera is None else (camera,))
        self.counts = StepCounts()
        self.simulator = LaneSimulator(
            env,
            name=name,
            chunk=chunk,
            stop_at_end=auto_reset != "deferred" and not ignore_terminations,
            recorder=self.recorder,
            counts=self.counts,
            scorer=scorer,
            ignore_terminations=ignore_terminations,
        )
        self.statistics = EpisodeStatistics(
            num_envs,
            name=name,
            chunk=chunk,
            ignore_terminations=ignore_terminations,
            reward=reward,
            reward_coef=reward_coef,
            extras=env.info.extras,
        )
        self.trajectories = RunningTrajectories(num_envs)
        self.keeps_actions = auto_reset != "off"
        self.streams = StreamPositions(num_envs, self.simulator.no_actions()[:0])
        self.gives_up = gives_up
        self.on_fault = on_fault
        self.replay = StreamReplay(
            self.simulator,
            self.statistics,
            self.streams,
            self.counts,
            self._find_broken,
            self._reset_envs,
            self._request_of,
        )
        self.requests: list[EpisodeRequest | None] = [None] * num_envs
        """Request of each env's running episode, or of its last one."""
        self.identity = np.zeros((num_envs, 4), np.int64)
        """Number, key, episode and version of these requests."""
        self.all_envs = np.arange(num_envs)
        self.clear_tickets()

    def clear_tickets(self) -> None:
        """Drop the running tickets. Streams between two tickets are kept."""
        self.waiting = WaitingTickets()
        """Tickets that no env has started."""
        self.loaded_tasks: list[str | None] = [None] * self.num_envs
        """Task whose scene each env has loaded since then: a resumed run knows no earlier ones, and chooses alike."""
        self.active = np.zeros(self.num_envs, bool)
        """Envs that run a ticket."""
        self.obs_env_ids = NO_ENVS
        """Envs of the observations `obs`, in their order."""
        self.recorder.clear()
        self.frames.clear()
        self.trajectories.clear()

    def step(self, actions: Array | None = None, tickets: Sequence[EpisodeRequest] = ()) -> StepRequest:
        """Execute actions, start tickets in free envs, and ask for the next chunks.

        Args:
            actions: float [R, C, A], aligned with the last request's `positions`.
            tickets: further tickets; those without a free env wait in the lane.
        """
        self.waiting.extend(tickets)
        self.counts.reset()
        if not self.active.any():
            self._renew_observations(self._start_tickets())
            return self._build_request()
        assert actions is not None
        env_ids = np.flatnonzero(self.active)
        chosen = self.simulator.all_actions(actions, env_ids)
        expert_step = None
        if self.expert is not None:
            requests = [self._request_of(env_id) for env_id in env_ids.tolist()]
            expert_step = self.expert.advise_envs(env_ids, requests, self.statistics.chunks[env_ids])
            chosen = expert_step.mix_actions(chosen)
        remaining = self.statistics.remaining_actions(self.active)
        # No env has more actions left before its step limit.
        width = min(self.chunk, int(remaining.max()))
        result = self.simulator.chunk_step(chosen[:, :width], self.active, remaining)
        if expert_step is not None:
            result = expert_step.mark_source(result, chosen)
        broken = self._find_broken(self.active)
        record, ends, executed = self.statistics.add_chunk(self.active, remaining, result, broken)
        if expert_step is not None:
            record[LABELS] = expert_step.labels
        self.counts.env_steps += executed
        again = self._record_chunk(env_ids, broken, chosen, record, result)

        last = ends
        if self.chunk_steps is not None:
            last = self.active & (self.trajectories.ticket_lengths(self.all_envs) == self.chunk_steps)
        truncated = np.asarray(record["truncated"].any(1))
        # A ticket may be over in the middle of an episode, whose return goes on.
        cut = (ends if self.bootstrap == "ended" else truncated) | (last & ~ends)
        cut[broken] = False
        valued = np.flatnonzero(cut & self.active) if self.bootstrap != "none" else NO_ENVS
        valued_identity = self.identity[valued]
        final = self._with_steps(result.obs.take(valued), valued) if len(valued) else None

        for env_id in np.flatnonzero(ends).tolist():
            self._end_episode(env_id, truncated=bool(truncated[env_id]))
        continued = np.flatnonzero(ends & ~last)
        finished = self._end_tickets(np.flatnonzero(last & self.active), result.obs)
        for env_id in broken.tolist():
            self.active[env_id] = not self.gives_up(self._request_of(env_id).state)
        broken = broken[self.active[broken]]
        self.obs = result.obs
        self.obs_env_ids = self.all_envs
        self._renew_observations(np.concatenate([continued, broken, self._start_tickets()]))
        return self._build_request(valued_identity, final, finished, again)

    def _record_chunk(
        self, env_ids: Array, broken: Array, chosen: Array, record: dict[str, Array], result: ChunkResult
    ) -> list[tuple[int, int]]:
        """Record a chunk step of these envs. Return `StepRequest.again` for those that broke."""
        self.trajectories.add_chunk({**record, ACTIONS: chosen} if self.keeps_actions else record)
        moved = np.setdiff1d(env_ids, broken) if len(broken) else env_ids
        executed = chosen
        if result.executed_actions is not None:
            executed = chosen.copy()
            executed[:, : result.executed_actions.shape[1]] = result.executed_actions
        for observer in self.observers:
            observer.on_chunk(moved, executed, record, self.statistics.at_end, result.obs)
        again = [
            (self._request_of(env_id).number, self.trajectories.drop_attempt(env_id)) for env_id in broken.tolist()
        ]
        if self.recorder.running:
            self.recorder.add_chunk(moved, executed, result, record)
        if self.frames.running:
            self.frames.add_frames(env_ids, result.obs)
        return again

    # ------------------------------------------------------------------------------------- tickets and episodes

    def _start_tickets(self) -> Array:
        """Start waiting tickets in free envs. Return these envs, int64."""
        started = []
        for env_id in np.flatnonzero(~self.active).tolist() if self.waiting else ():
            previous = self.requests[env_id]
            loaded = self.loaded_tasks[env_id]
            ticket = self.waiting.take_ticket(self.first_env + env_id, loaded)
            while ticket is not None and self.gives_up(ticket.state):
                ticket = self.waiting.take_ticket(self.first_env + env_id, loaded)
            if ticket is None:
                continue
            self._assign_request(env_id, ticket)
            continues = previous is not None and previous.number == ticket.follows
            self.streams.begin_ticket(env_id, ticket, continues)
            if ticket.env_id is not None and not len(self.streams.earlier_chunks[env_id]):
                self._assign_drawn_episode(env_id, ticket.episode)  # drawn with the task weights of this ticket
            started.append(env_id)
        env_ids = np.array(started, np.int64)
        self.active[env_ids] = True
        self.trajectories.begin_tickets(env_ids)
        return env_ids

    def _next_episode(self, env_id: int) -> None:
        """Continue the env's ticket, or its stream, with another episode."""
        self._assign_drawn_episode(env_id, self._request_of(env_id).episode + 1)
        self.streams.begin_episode(env_id)
        self.trajectories.begin_episodes(env_id)

    def _assign_drawn_episode(self, env_id: int, episode: int) -> None:
        assert self.draw is not None
        self._assign_request(env_id, self.draw(self._request_of(env_id), episode))

    def _assign_request(self, env_id: int, request: EpisodeRequest) -> None:
        self.requests[env_id] = request
        self.loaded_tasks[env_id] = request.state.task
        self.identity[env_id] = request.number, request.random_key, request.episode, request.version
        self.statistics.limit[env_id] = self.step_limits[request.state.task]

    def _end_episode(self, env_id: int, truncated: bool) -> None:
        """Keep the results of an episode that ended, and choose the next one of the ticket with auto_reset."""
        episode = self.statistics.finish_episode(env_id, self._request_of(env_id), truncated)
        self.trajectories.episodes[env_id].append(episode)
        if self.recorder.running:
            self.recorder.end_episode(env_id, episode)
        if self.frames.running:
            self.frames.end_episode(env_id)
        if self.chunk_steps is not None:
            self._next_episode(env_id)

    def _end_tickets(self, env_ids: Array, obs: Observation) -> list[EnvTrajectory]:
        """Return the trajectories of these envs' tickets and free the envs. `obs`: observations of all envs."""
        self.active[env_ids] = False
        finished = []
        amid_episode = []
        for env_id in env_ids.tolist():
            request = self._request_of(env_id)
            cursor = None
            if request.env_id is not None:
                chunks = self.trajectories.episode_actions(env_id)
                cursor = self.streams.stream_cursor(env_id, request, chunks, float(self.statistics.total[env_id]))
                if cursor.actions is not None and len(cursor.actions):
                    amid_episode.append(env_id)
            frames, recording = self.frames.finished.pop(env_id, None), self.recorder.finished.pop(env_id, None)
            finished.append(self.trajectories.end_ticket(env_id, request, frames, recording, cursor))
        self.streams.keep_observations(amid_episode, obs)
        return finished

    def _request_of(self, env_id: int) -> EpisodeRequest:
        request = self.requests[env_id]
        assert request is not None
        return request

    # ---------------------------------------------------------------------------------------------- observations

    def _renew_observations(self, env_ids: Array) -> None:
        """Continue envs where their stream is, or else from a reset, and renew their observations."""
        if not len(env_ids):
            return
        env_ids = np.unique(env_ids)
        is_unchanged = self.active.copy()
        is_unchanged[env_ids] = False
        unchanged = np.flatnonzero(is_unchanged)
        parts = [(unchanged, self.obs.take(unchanged))] if len(unchanged) else []
        continuing = self.streams.take_observations(env_ids)
        parts += continuing
        parts += self._set_up(np.setdiff1d(env_ids, np.concatenate([NO_ENVS, *(part for part, _ in continuing)])))
        self.obs = Observation.concat([obs for _, obs in parts])
        self.obs_env_ids = np.concatenate([part for part, _ in parts])

    def _set_up(self, env_ids: Array) -> list[tuple[Array, Observation]]:
        """Reset envs, and replay the episodes that had begun before."""
        if not len(env_ids):
            return []
        has_begun = np.array([len(self.streams.earlier_chunks[env_id]) > 0 for env_id in env_ids.tolist()])
        if not self.simulator.is_deterministic:
            for env_id in env_ids[has_begun].tolist():
                self._next_episode(env_id)
                self.counts.restarted += 1
            has_begun[:] = False
        obs = self._reset_envs(env_ids)
        if not has_begun.any():
            return [(env_ids, obs)]
        replayed = env_ids[has_begun]
        return [
            (env_ids[~has_begun], obs.take(np.flatnonzero(~has_begun))),
            (replayed, self.replay.replay_actions(replayed)),
        ]

    def _reset_envs(self, env_ids: Array) -> Observation:
        """Reset envs to the beginning of their episodes. Return their observations."""
        requests = [self._request_of(env_id) for env_id in env_ids.tolist()]
        state_ids = np.array([request.state.id for request in requests], np.int64)
        seeds = derived_seeds(self.seed, "episode", [r.random_key for r in requests], [r.episode for r in requests])
        obs = self.simulator.reset_envs(env_ids, state_ids, seeds)
        self._find_broken(self.active)  # they are repaired already: these faults are only counted
        for observer in self.observers:
            observer.on_reset(env_ids, requests, seeds, obs)
        self.statistics.reset_episodes(env_ids)
        self.trajectories.begin_episodes(env_ids)
        for position, (env_id, request) in enumerate(zip(env_ids.tolist(), requests, strict=True)):
            if request.recorded or self.recorder.running:
                self.recorder.begin_episode(env_id, request, obs, position)
            if request.record or self.frames.running:
                self.frames.begin_episode(env_id, request, obs, position)
        return obs

    def _find_broken(self, active: Array) -> Array:
        """Report new faults. Return those of the active envs that broke since the last call, int64, ascending."""
        faults = self.simulator.take_faults()
        for env_id, texts in faults.items():
            self.streams.forget_observation(env_id)
            for text in texts:
                self.on_fault(text, self._request_of(env_id).state if active[env_id] else None)
        return np.array(sorted(env_id for env_id in faults if active[env_id]), np.int64)

    def _with_steps(self, obs: Observation, env_ids: Array) -> Observation:
        """Return the observation of these envs with the step counts of their episodes."""
        return evolve(obs, steps=self.statistics.steps[env_ids])

    # --------------------------------------------------------------------------------------------------- request

    def _count_ending(self, env_ids: Array, lengths: Array) -> int:
        """Return how many of these envs, with this many chunk steps each, certainly end their tickets with another."""
        if self.chunk_steps is not None:
            return int(np.count_nonzero(lengths + 1 == self.chunk_steps))
        remaining = self.statistics.limit[env_ids] - self.statistics.steps[env_ids]
        return int(np.count_nonzero(remaining <= self.chunk))

    def _asking_obs(self, positions: Array) -> Observation | None:
        """Return the observations of the envs that need a chunk."""
        if not len(positions):
            return None
        if np.array_equal(positions, self.obs_env_ids):
            return self._with_steps(self.obs, positions)
        rows = np.empty(self.num_envs, np.int64)
        rows[self.obs_env_ids] = np.arange(len(self.obs_env_ids))
        return self._with_steps(self.obs.take(rows[positions]), positions)

    def _build_request(
        self,
        valued: Array = NO_IDENTITY,
        final: Observation | None = None,
        finished: Sequence[EnvTrajectory] = (),
        again: Sequence[tuple[int, int]] = (),
    ) -> StepRequest:
        positions = np.flatnonzero(self.active)
        asking = np.empty((6, len(positions)), np.int64)
        asking[0] = positions
        asking[[1, 2, 3, 5]] = self.identity[positions].T
        asking[4] = self.statistics.chunks[positions]
        lengths = self.trajectories.ticket_lengths(positions)
        return StepRequest(
            asking=asking,
            obs=self._asking_obs(positions),
            ended=valued[:, [NUMBER, VERSION]].T.copy(),
            final=final,
            finished=tuple(finished),
            again=tuple(again),
            steps=int(lengths.sum()),
            ending=self._count_ending(positions, lengths),
            waiting=len(self.waiting),
            seconds=self.counts.seconds,
            env_steps=self.counts.env_steps,
            replayed=self.counts.replayed,
            restarted=self.counts.restarted,
        )
