"""The sim role: lanes of envs, their episodes and the demonstrations of their scripted expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np
from attrs import evolve

from vla_rl.core.errors import PluginError, UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.interrupts import StopRequested
from vla_rl.core.manager import unwrap_component
from vla_rl.core.randomness import generator
from vla_rl.core.reset_states import draw_state
from vla_rl.core.reward_models import RewardModel
from vla_rl.core.spec.spec import Spec, asks_expert
from vla_rl.core.types import Array, EnvInfo, Observation, ResetState, to_numpy
from vla_rl.runtime.comm.interfaces import Demonstrations, EnvInterface
from vla_rl.runtime.comm.shared_memory import SharedMemoryWriter
from vla_rl.runtime.messages.ids import DEMONSTRATIONS
from vla_rl.runtime.messages.requests import EpisodeRequest, StepRequest, too_many_faults
from vla_rl.runtime.placement.assignments import LaneSlice
from vla_rl.runtime.workers.env.episodes import Bootstrap, Episodes, RolloutObserver
from vla_rl.runtime.workers.env.expert import LaneExpert
from vla_rl.runtime.workers.env.reward_scorer import RewardScorer
from vla_rl.runtime.workers.env.simulator import close_env
from vla_rl.toolkit.data.recording import settings_in


class EnvLanes:
    """Lanes of real or imagined envs, with the episodes of each purpose."""

    def __init__(self, name: str, max_faults: int) -> None:
        """Create lanes without episodes.

        Args:
            name: name of the simulator, for errors.
            max_faults: number of faults that the run tolerates.
        """
        self.name = name
        self.max_faults = max_faults
        self.episodes_of: dict[str, Mapping[int, Episodes]] = {}
        """Purpose of a `PolicyMode` -> lane -> its episodes."""
        self.running: dict[int, Episodes] = {}
        """Lane -> the episodes that it is running."""
        self.faults: list[str] = []
        """Faults that no request has reported yet."""
        self.fault_count = 0
        self._counting = Lock()

    def begin_lane(self, lane: int, purpose: str, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        """Start these tickets, and forget what the lane ran before."""
        self.running[lane] = self.episodes_of[purpose][lane]
        self.running[lane].clear_tickets()
        return self.step_lane(lane, None, tickets)

    def step_lane(self, lane: int, actions: Array | None, tickets: Sequence[EpisodeRequest]) -> StepRequest:
        """Execute a chunk in each env that has a ticket, and start further tickets."""
        request = self.running[lane].step(actions, tickets)
        with self._counting:
            faults = self.faults
            self.faults = []
        return evolve(request, faults=tuple(faults)) if faults else request

    def on_fault(self, text: str) -> None:
        """Count a fault of an env. Raises StopAndSave when there were too many."""
        with self._counting:
            self.fault_count += 1
            self.faults.append(text)
            count = self.fault_count
        if count > self.max_faults:
            raise too_many_faults(count, self.max_faults, self.name, text)


def in_host_memory(request: StepRequest) -> StepRequest:
    """Return the request with observations as NumPy arrays."""
    obs = None if request.obs is None else request.obs.numpy()
    final = None if request.final is None else request.final.numpy()
    return evolve(request, obs=obs, final=final)


MOST_FAULTS_AT_A_STATE = 2
"""Faults after which a reset state is taken for the cause: evaluations leave it out, and say how a run can."""


class EnvWorker(EnvLanes, EnvInterface):
    """The simulators of a worker, one component for each lane (role "sim")."""

    def __init__(
        self,
        spec: Spec,
        envs: dict[int, SimEnv],
        slices: Sequence[LaneSlice],
        *,
        bootstrap: Bootstrap,
        framed: bool,
        camera: str | None,
        local: bool,
        make_observers: Sequence[Callable[[], RolloutObserver]] = (),
        reward_model: RewardModel | None = None,
        heartbeat: Callable[[], None],
        stop_requested: Callable[[], bool] = lambda: False,
    ):
        """Create the episodes of all lanes.

        Args:
            envs: lane index -> its simulator.
            bootstrap: as for Episodes; "none" where the algorithm uses no values.
            framed: the algorithm embeds the frames of training episodes.
            camera: camera of these frames; None: the first one.
            local: the policy is in this process, so observations stay on their device.
            make_observers: each makes an observer for the training episodes of a lane.
            reward_model: model of the spec's `rewards:`; None: the simulator judges success.
            heartbeat: called within long calls.
            stop_requested: whether demonstrations have to end early, with StopRequested.
        """
        super().__init__(spec.env.type, spec.runtime.max_faults)
        self.spec = spec
        self.envs = envs
        self.slices = {lane.index: lane for lane in slices}
        self.local = local
        self.heartbeat = heartbeat
        self.stop_requested = stop_requested
        self.reward_model = reward_model
        if reward_model is not None:
            unwrap_component(reward_model).stop_requested = stop_requested
        for env in map(unwrap_component, envs.values()):
            if env.waits_s > 0:
                env.stop_requested = stop_requested
        self._reward_lock = Lock()
        self.observed = bool(make_observers)
        self.solved: dict[int, int] = {}
        """Lane -> number of episodes in which the scripted expert succeeded."""
        self.outboxes = {s.index: SharedMemoryWriter() for s in slices}
        self.shared: dict[int, bool] = {}
        """Lane -> whether the process of its policy shares memory with this one."""
        rollout = spec.rollout
        shared: dict[str, Any] = {
            "name": spec.env.type,
            "chunk": rollout.chunk,
            "max_steps": rollout.max_steps,
            "seed": spec.seed,
            "on_fault": self.note_fault,
            "record": settings_in(spec.hooks),
        }
        self.faults_at: Counter[ResetState] = Counter()
        """Reset state -> faults of envs in its episodes."""
        first = next(iter(envs.values()))
        self._check_excluded()
        self.states = self._usable_states("train")
        self.train = {
            i: Episodes(
                env,
                first_env=self.slices[i].first_env,
                auto_reset="off" if rollout.auto_reset is None else rollout.auto_reset.mode,
                chunk_steps=None if rollout.steps is None else rollout.steps // rollout.chunk,
                draw=self._draw_episode,
                ignore_terminations=rollout.ignore_terminations,
                reward=rollout.reward,
                reward_coef=rollout.reward_coef,
                bootstrap=bootstrap,
                camera=camera_of(first.info, spec, camera) if framed else None,
                observers=[make() for make in make_observers],
                scorer=self._make_scorer(judges_success=True),
                expert=self._make_expert(i, env) if asks_expert(spec) else None,
                **shared,
            )
            for i, env in envs.items()
        }
        evaluation_scorer = self._make_scorer(judges_success=spec.rewards is not None and spec.rewards.evaluation)
        self.eval = {
            i: Episodes(
                env,
                **shared,
                scorer=evaluation_scorer,
                gives_up=lambda state: self.faults_at[state] >= MOST_FAULTS_AT_A_STATE,
            )
            for i, env in envs.items()
        }
        self.running = dict(self.train)
        self.episodes_of = {"action": self.train, "evaluation": self.eval}
        if not self.states:
            raise PluginError(f"env {spec.env.type!r} offers no reset states in its train split")

    def swap_envs(self, envs: dict[int, SimEnv]) -> dict[int, SimEnv]:
        """Replace the simulators by these, or, while no rollout runs, by none. Return the previous ones."""
        before = self.envs
        self.envs = envs
        for episodes_by_lane in (self.train, self.eval):
            for lane, episodes in episodes_by_lane.items():
                episodes.simulator.env = envs.get(lane)  # type: ignore[assignment]
        return before

    def eval_states(self) -> tuple[ResetState, ...]:
        return self._usable_states(self.spec.eval.split)

    def train_states(self) -> tuple[ResetState, ...]:
        return self.states

    def begin(self, lane: int, purpose: str, tickets: Sequence[EpisodeRequest]) -> Any:
        if purpose == "evaluation":
            self.train[lane].streams.forget_all_observations()
        return self._make_answer(lane, self.begin_lane(lane, purpose, tickets))

    def step(self, lane: int, actions: Any, tickets: Sequence[EpisodeRequest]) -> Any:
        return self._make_answer(lane, self.step_lane(lane, actions, tickets))

    def collect_demonstrations(
        self, lane: int, count: int, noise: float
    ) -> tuple[Demonstrations | None, tuple[int, int, int]]:
        env, lane_slice = self.envs[lane], self.slices[lane]
        episodes = self.eval[lane]
        self.train[lane].streams.forget_all_observations()
        kept_obs: list[Observation] = []
        kept_actions: list[Array] = []
        sort_keys: list[Array] = []
        good = tried = 0
        # An expert may fail: up to three times as many attempts as demonstrations.
        for round_index in range(3 * -(-count // lane_slice.num_envs)):
            if good >= count:
                break
            index = [
                round_index * self.spec.env.num_envs + lane_slice.first_env + p for p in range(lane_slice.num_envs)
            ]
            starts = [
                EpisodeRequest(state=draw_state(self.states, self.spec.seed, i, DEMONSTRATIONS), number=i)
                for i in index
            ]
            episodes.clear_tickets()
            request = episodes.step(None, starts)
            solved = np.zeros(lane_slice.num_envs, bool)
            steps: list[tuple[Array, Array, Observation, Array]] = []
            # Index in `steps` at which each env's last attempt begins: above 0 where the env broke and started again.
            first = np.zeros(lane_slice.num_envs, np.int64)
            while not request.done and request.obs is not None:
                self.heartbeat()
                if self.stop_requested():
                    raise StopRequested
                first[request.positions[request.chunk_numbers == 0]] = len(steps)
                label = to_numpy(self._expert_chunk(env))[request.positions]
                jitter = [
                    generator(self.spec.seed, "expert-noise", int(n), 0, int(c)).standard_normal(label.shape[1:])
                    for n, c in zip(request.ticket_numbers, request.chunk_numbers, strict=True)
                ]
                steps.append((request.positions, request.chunk_numbers, request.obs.numpy(), label))
                noisy = np.clip(label + noise * np.stack(jitter), episodes.simulator.low, episodes.simulator.high)
                request = episodes.step(noisy.astype(np.float32))
                for ticket in request.finished:
                    solved[ticket.number - index[0]] = ticket.episodes[0].success_once
            good, tried = good + int(solved.sum()), tried + lane_slice.num_envs
            self.solved[lane] = min(good, count)
            for i, (positions, chunks, obs, label) in enumerate(steps):
                env_ids = np.flatnonzero(solved[positions] & (i >= first[positions]))
                if len(env_ids):
                    kept_obs.append(obs.take(env_ids))
                    kept_actions.append(label[env_ids])
                    sort_keys.append(
                        np.stack([np.full(len(env_ids), round_index), chunks[env_ids], positions[env_ids]])
                    )
        if not kept_obs:
            return None, (0, 0, tried)
        observations, actions = Observation.concat(kept_obs), np.concatenate(kept_actions)
        # lexsort sorts by its last key first: by round, then chunk, then env.
        order = np.lexsort(np.concatenate(sort_keys, axis=1)[::-1])
        if np.any(np.diff(order) < 0):  # an env that broke ran later than the others
            observations, actions = observations.take(order), actions[order]
        return (observations, actions), (len(actions), good, tried)

    def note_fault(self, text: str, state: ResetState | None) -> None:
        """Count a fault of an env, and report it with the episode's reset state. Raises StopAndSave for too many."""
        if state is not None:
            with self._counting:
                self.faults_at[state] += 1
                count = self.faults_at[state]
            text = f"task {state.task!r}, state {state.id}: {text}"
            if count >= MOST_FAULTS_AT_A_STATE:
                excluded = sorted({*self.spec.env.exclude_states, state.id})
                text += f"\nstate {state.id} broke envs {count} times; to leave it out: 'env.exclude_states={excluded}'"
        self.on_fault(text)

    def _usable_states(self, split: str) -> tuple[ResetState, ...]:
        """Return the reset states of a split without those of `env.exclude_states`. Raises UserError if all are."""
        states = next(iter(self.envs.values())).reset_states(split)
        usable = tuple(state for state in states if state.id not in self.spec.env.exclude_states)
        if states and not usable:
            raise UserError(f"env.exclude_states: lists all {len(states)} states of the {split} split; leave some out")
        return usable

    def _check_excluded(self) -> None:
        """Raise UserError for an id in `env.exclude_states` that no reset state has."""
        if not self.spec.env.exclude_states:
            return
        ids: dict[str, list[int]] = {}
        for split in ("train", "eval"):
            with suppress(UserError):  # a simulator without evaluation
                ids[split] = [state.id for state in next(iter(self.envs.values())).reset_states(split)]
        unknown = set(self.spec.env.exclude_states).difference(*ids.values())
        if unknown:
            ranges = ", ".join(f"{min(of)} to {max(of)} ({split})" for split, of in ids.items() if of)
            raise UserError(
                f"env.exclude_states: env {self.spec.env.type!r} has no state {min(unknown)}; its states: {ranges}"
            )

    def _make_expert(self, lane: int, env: SimEnv) -> LaneExpert:
        """Return the expert of a lane, which asks the lane's simulator of the moment."""
        return LaneExpert(
            lambda: self._expert_chunk(self.envs[lane]),
            name=self.spec.env.type,
            info=env.info,
            num_envs=env.num_envs,
            chunk=self.spec.rollout.chunk,
            seed=self.spec.seed,
        )

    def _expert_chunk(self, env: SimEnv) -> Any:
        try:
            return env.expert_chunk()
        except UserError as exc:
            if type(exc) is not UserError:  # such as a SafetyStop, which the run handles
                raise
            raise UserError(
                f"env {self.spec.env.type!r} has no scripted expert to learn from here ({exc}); leave out `bc_warmup` "
                f"and trainers that ask an expert, or clone recorded demonstrations (`imitation: {{data: ...}}`, "
                f"vla-rl sft)"
            ) from exc

    def close(self) -> list[str]:
        """Close all simulators. Return what went wrong, in words."""
        for writer in self.outboxes.values():
            writer.close()
        if self.reward_model is not None:
            self.reward_model.close()
        flaws = [close_env(env, self.name) for env in self.envs.values()]
        return [flaw for flaw in flaws if flaw]

    def _make_scorer(self, *, judges_success: bool) -> RewardScorer | None:
        """Return the scorer of chunk steps by the spec's `rewards:`; None if the spec has none."""
        rewards = self.spec.rewards
        if rewards is None or self.reward_model is None:
            return None
        return RewardScorer(
            self.reward_model,
            self._reward_lock,
            name=rewards.type,
            threshold=rewards.threshold,
            judges_success=judges_success,
        )

    def _draw_episode(self, start: EpisodeRequest, episode: int) -> EpisodeRequest:
        """Return episode number `episode` of a ticket, with a drawn reset state (auto_reset)."""
        group = start.random_key // self.spec.rollout.group_size
        return evolve(
            start, episode=episode, state=draw_state(self.states, self.spec.seed, group, episode, start.weights)
        )

    def _make_answer(self, lane: int, request: StepRequest) -> Any:
        """Return the request, or the message in which it travels."""
        if self.local and not self.observed:
            return request
        # Imagined observations are in host memory too, and samples of both kinds form one batch.
        request = in_host_memory(request)
        return request if self.local else self.outboxes[lane].make_message(request, shared=self.shared.get(lane, False))


def camera_of(info: EnvInfo, spec: Spec, requested: str | None) -> str:
    """Return the camera whose frames the algorithm sees. Raises UserError if the env has none, or none of that name."""
    name, cameras = spec.algorithm.type, tuple(info.cameras)
    if not cameras:
        raise UserError(
            f"algorithm {name!r} looks at the frames of episodes, and env {spec.env.type!r} has no cameras; give it "
            "one, or choose another algorithm"
        )
    if requested is not None and requested not in cameras:
        raise UserError(
            f"algorithm {name!r} looks at the frames of camera {requested!r}, and env {spec.env.type!r} has none of "
            f"that name; it has: {', '.join(cameras)}"
        )
    return requested or cameras[0]
