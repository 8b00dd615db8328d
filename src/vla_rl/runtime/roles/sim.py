"""The sim role: lanes of simulator rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from vla_rl.core.episodes import EPISODES_PER_STEP, EnvError, Episodes, Request, Start
from vla_rl.core.errors import NotOffered, PluginError, UserError
from vla_rl.core.events import EpisodeFrames
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import generator
from vla_rl.core.reset_states import TaskWeights, deal_states, draw_state
from vla_rl.core.spec.spec import Spec
from vla_rl.core.types import EnvInfo, Observation, ResetState, to_numpy
from vla_rl.runtime.assignments import LaneSlice
from vla_rl.runtime.backends.wire import Outbox
from vla_rl.runtime.remote import remote

Array = np.ndarray[Any, Any]
Demonstrations = tuple[Observation, Array]


def too_many_faults(count: int, limit: int, env: str, last: str) -> EnvError:
    return EnvError(f"env {env!r} broke {count} times (runtime.max_faults: {limit}); the last time:\n{last}")


@frozen(kw_only=True)
class EvalItem:
    """One episode of an evaluation; `index` and `repeat` key its randomness, so no placement changes it."""

    state: ResetState
    index: int
    repeat: int
    record: bool


class SimRole:
    def __init__(
        self,
        spec: Spec,
        envs: dict[int, SimEnv],
        slices: Sequence[LaneSlice],
        *,
        bootstrap: bool,
        grouped: bool,
        framed: bool,
        camera: str | None,
        local: bool,
        beat: Callable[[], None],
    ):
        """
        Args:
            envs: lane index -> its simulator.
            grouped: the algorithm compares trajectories within groups, so these must not share a state.
            framed: the algorithm embeds the frames of training episodes, so these are recorded.
            camera: whose frames; None: the first one's.
            local: the policy is in this process, so observations stay as they are.
            beat: says that a long call goes on.
        """
        self.spec, self.envs, self.slices, self.local, self.beat = spec, envs, {s.index: s for s in slices}, local, beat
        self.framed = framed
        self.outboxes = {s.index: Outbox() for s in slices}
        self.shared: dict[int, bool] = {}
        """Lane -> the process of its policy shares memory with this one."""
        rollout = spec.rollout
        shared: dict[str, Any] = {
            "name": spec.env.type,
            "chunk": rollout.chunk,
            "max_steps": rollout.max_steps,
            "seed": spec.seed,
            "on_fault": self._on_fault,
        }
        self.faults: list[str] = []
        self.fault_count = 0
        self._deal: tuple[int, tuple[tuple[ResetState, ...], ...]] = (-1, ())
        self.train = {
            i: Episodes(
                env,
                auto_reset=rollout.auto_reset,
                ignore_terminations=rollout.ignore_terminations,
                reward=rollout.reward,
                reward_coef=rollout.reward_coef,
                bootstrap=bootstrap,
                **shared,
            )
            for i, env in envs.items()
        }
        self.eval = {i: Episodes(env, **shared) for i, env in envs.items()}
        self.running = dict(self.train)
        first = next(iter(envs.values()))
        self.states = first.reset_states("train")
        if not self.states:
            raise PluginError(f"env {spec.env.type!r} offers no reset states in its train split")
        if framed:
            self.camera = camera_of(first.info, spec, camera)
        groups = spec.env.num_envs // rollout.group_size
        if grouped and groups > len(self.states):
            raise UserError(
                f"{spec.env.num_envs} rows in groups of {rollout.group_size} are {groups} groups, which start from "
                f"states of their own, and env {spec.env.type!r} has {len(self.states)} train states; raise "
                "rollout.group_size, lower env.num_envs, or offer more tasks or states"
            )

    def swap(self, envs: dict[int, SimEnv]) -> dict[int, SimEnv]:
        """Go on with these simulators, or, while no round is played, without any. -> those there were."""
        before, self.envs = self.envs, envs
        for played in (self.train, self.eval):
            for lane, episodes in played.items():
                episodes.env = envs.get(lane)  # type: ignore[assignment]
        return before

    def info(self) -> EnvInfo:
        return next(iter(self.envs.values())).info

    @remote()
    def eval_states(self) -> tuple[ResetState, ...]:
        return next(iter(self.envs.values())).reset_states("eval")

    @remote()
    def train_tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(state.task for state in self.states))

    @remote(lane=0, main=True)
    def begin_train(self, lane: int, step: int, round_index: int, weights: TaskWeights) -> Any:
        """Reset the lane's rows to the states of this rollout's round, drawn by these weights of tasks, and ask for
        actions."""
        own, rollout = self.slices[lane], self.spec.rollout
        groups = self.spec.env.num_envs // rollout.group_size

        def start(position: int, index: int) -> Start:
            row = own.first_row + position
            group = row // rollout.group_size
            if rollout.auto_reset == "off":
                state = self._dealt(step, groups, weights)[round_index][group]
            else:
                state = draw_state(self.states, self.spec.seed, step, index * groups + group, weights)
            return Start(state=state, row=row, episode=step * EPISODES_PER_STEP + index, record=self.framed)

        chunk_steps = None if rollout.auto_reset == "off" else (rollout.steps or 0) // rollout.chunk
        self.running[lane] = self.train[lane]
        starts = [start(p, round_index) for p in range(own.rows)]
        return self._answer(lane, self.running[lane].begin(starts, chunk_steps, start))

    @remote(lane=0)
    def begin_eval(self, lane: int, items: Sequence[EvalItem | None]) -> Any:
        """One evaluation episode a row (None: idle)."""
        starts = [
            None if i is None else Start(state=i.state, row=i.index, episode=i.repeat, record=i.record) for i in items
        ]
        self.running[lane] = self.eval[lane]
        return self._answer(lane, self.running[lane].begin(starts, None, None))

    @remote(lane=0, main=True)
    def step(self, lane: int, actions: Any) -> Any:
        return self._answer(lane, self.running[lane].step(actions))

    @remote(lane=0)
    def take_frames(self, lane: int) -> tuple[Array, ...]:
        """What the algorithm's camera saw of each row's episode in the round that ended, uint8 [frames, H, W, 3] a row:
        the first observation and one after each chunk. To be taken before `collect`; none for a row that did not
        play."""
        episodes, own = self.running[lane], self.slices[lane]
        height, width = episodes.env.info.cameras[self.camera]
        recorded, episodes.recorded = episodes.recorded, {}
        of_row = {row - own.first_row: images[self.camera] for (row, _), images in recorded.items()}
        none = np.zeros((0, height, width, 3), np.uint8)
        return tuple(of_row.get(position, none) for position in range(own.rows))

    @remote(lane=0)
    def collect(self, lane: int) -> dict[str, Any]:
        """The light part of the round that ended, its episodes, and what it cost."""
        episodes = self.running[lane]
        light = episodes.light()
        finished = [episode for _, episode in sorted(episodes.finished, key=lambda pair: pair[1].episode)]
        result = {
            "light": light,
            "first_episode": dict(reversed(episodes.finished)),
            "episodes": finished,
            "frames": self._frames(episodes),
            "seconds": episodes.seconds,
            "env_steps": episodes.env_steps,
            "faults": self.faults,
        }
        self.faults = []
        episodes.seconds, episodes.env_steps, episodes.recorded = 0.0, 0, {}
        return result

    @remote(phase="act")
    def demonstrate(self, lane: int, count: int, noise: float) -> tuple[Demonstrations | None, tuple[int, int, int]]:
        """Let the scripted expert play until `count` episodes succeeded (at most 3 tries for each).

        Gaussian noise of this std is added to what is executed, never to the label.
        Raises UserError for a simulator without an expert.
        Returns: ((observations, expert actions float32 [B, C, A]) of successful episodes, (B, successes, tries)).
        """
        env, own = self.envs[lane], self.slices[lane]
        episodes = self.eval[lane]
        kept_obs: list[Observation] = []
        kept_actions: list[Array] = []
        found_at: list[Array] = []
        good = tried = 0
        for round_index in range(3 * -(-count // own.rows)):
            if good >= count:
                break
            index = [round_index * self.spec.env.num_envs + own.first_row + p for p in range(own.rows)]
            starts = [
                Start(state=draw_state(self.states, self.spec.seed, EPISODES_PER_STEP, i), row=i, episode=0)
                for i in index
            ]
            request = episodes.begin(starts, None, None)
            steps: list[tuple[Array, Array, Observation, Array]] = []
            first = np.zeros(own.rows, np.int64)  # of the steps; later than 0 where a row broke and began anew
            while not request.done and request.obs is not None:
                self.beat()
                first[request.positions[request.chunks == 0]] = len(steps)
                label = to_numpy(self._expert_chunk(env))[request.positions]
                jitter = [
                    generator(self.spec.seed, "expert-noise", int(r), 0, int(c)).standard_normal(label.shape[1:])
                    for r, c in zip(request.rows, request.chunks, strict=True)
                ]
                steps.append((request.positions, request.chunks, request.obs.numpy(), label))
                noisy = np.clip(label + noise * np.stack(jitter), episodes.low, episodes.high)
                request = episodes.step(noisy.astype(np.float32))
            solved = np.zeros(own.rows, bool)
            for row, episode in episodes.finished:
                solved[row] = episode.success_once
            good, tried = good + int(solved.sum()), tried + own.rows
            for i, (positions, chunks, obs, label) in enumerate(steps):
                rows = np.flatnonzero(solved[positions] & (i >= first[positions]))
                if len(rows):
                    kept_obs.append(obs.take(rows))
                    kept_actions.append(label[rows])
                    found_at.append(np.stack([np.full(len(rows), round_index), chunks[rows], positions[rows]]))
        if not kept_obs:
            return None, (0, 0, tried)
        observations, actions = Observation.concat(kept_obs), np.concatenate(kept_actions)
        order = np.lexsort(np.concatenate(found_at, axis=1)[::-1])
        if np.any(np.diff(order) < 0):  # a row that broke plays later than its neighbours
            observations, actions = observations.take(order), actions[order]
        return (observations, actions), (len(actions), good, tried)

    def _expert_chunk(self, env: SimEnv) -> Any:
        try:
            return env.expert_chunk()
        except NotOffered as exc:
            raise UserError(
                f"env {self.spec.env.type!r} has no scripted expert to learn from here ({exc}); leave out `warmup`, or "
                "clone recorded demonstrations (`imitation: {data: ...}`, vla-rl sft)"
            ) from exc

    def close(self) -> None:
        for outbox in self.outboxes.values():
            outbox.close()
        for env in self.envs.values():
            env.close()

    def _dealt(self, step: int, groups: int, weights: TaskWeights) -> tuple[tuple[ResetState, ...], ...]:
        """States of this rollout by round and group of rows; drawn once for all rounds and lanes."""
        if self._deal[0] != step:
            rounds = self.spec.rollout.rounds(self.spec.env.num_envs) + self.spec.rollout.further_rounds
            self._deal = step, deal_states(self.states, self.spec.seed, step, rounds, groups, weights)
        return self._deal[1]

    def _on_fault(self, text: str) -> None:
        self.fault_count += 1
        self.faults.append(text)
        limit = self.spec.runtime.max_faults
        if self.fault_count > limit:
            raise too_many_faults(self.fault_count, limit, self.spec.env.type, text)

    def _answer(self, lane: int, request: Request) -> Any:
        """The request, or the message that it travels in."""
        if self.local:
            return request
        obs = None if request.obs is None else request.obs.numpy()
        final = None if request.final is None else request.final.numpy()
        return self.outboxes[lane].put(evolve(request, obs=obs, final=final), shared=self.shared.get(lane, False))

    def _frames(self, episodes: Episodes) -> list[EpisodeFrames]:
        frames = []
        for _, episode in episodes.finished:
            images = episodes.recorded.get((episode.row, episode.episode))
            if images is not None:
                text = episodes.instructions[episode.task]
                frames.append(
                    EpisodeFrames(task=episode.task, instruction=text, success=episode.success_once, images=images)
                )
        return frames


def camera_of(info: EnvInfo, spec: Spec, asked: str | None) -> str:
    """The camera whose frames the algorithm sees. Raises UserError where there is none, or none of that name."""
    name, there = spec.algorithm.type, tuple(info.cameras)
    if not there:
        raise UserError(
            f"algorithm {name!r} looks at the frames of episodes, and env {spec.env.type!r} has no cameras; give it "
            "one, or choose another algorithm"
        )
    if asked is not None and asked not in there:
        raise UserError(
            f"algorithm {name!r} looks at the frames of camera {asked!r}, and env {spec.env.type!r} has none of that "
            f"name; it has: {', '.join(there)}"
        )
    return asked or there[0]
