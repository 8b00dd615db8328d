"""Recording of episodes as data, in the simulators' process. Images are compressed as soon as they are rendered. An
ended episode's recording travels with its trajectory to the worker of its policy (`RecordingStore`). So memory holds
only the running episodes, compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field

from vla_rl.core.types import ActionSource, Array, ChunkResult, EnvInfo, Episode, Observation, to_numpy
from vla_rl.runtime.messages.requests import EpisodeRequest
from vla_rl.toolkit.data.recording import Recording, RecordSettings, encode_png


@define(kw_only=True)
class _RunningRecording:
    """Recording of a running episode."""

    images: dict[str, list[bytes]]
    states: list[Array] = field(factory=list)
    actions: list[Array] = field(factory=list)
    rewards: list[float] = field(factory=list)
    executed: list[int] = field(factory=list)
    interventions: list[Any] = field(factory=list)
    """Whether another source than the policy chose the action, or bool [C] a chunk; empty if no one can take over."""
    instruction: str


class EpisodeRecorder:
    """Recorder of the running episodes of one lane."""

    def __init__(self, info: EnvInfo, settings: RecordSettings) -> None:
        self.info = info
        self.settings = settings
        self.by_step = settings.rows == "steps"
        self.clear()

    def clear(self) -> None:
        """Drop all recordings."""
        self.running: dict[int, _RunningRecording] = {}
        """Env -> recording of its episode; while it is empty, no other method has to be called."""
        self.finished: dict[int, Recording] = {}
        """Env -> recording of its last episode, until it is taken."""

    def wants_steps(self, active: Array) -> bool:
        """Return whether one of the active envs (bool [N]) records every environment step."""
        return self.by_step and any(active[env_id] for env_id in self.running)

    def begin_episode(self, env_id: int, start: EpisodeRequest, obs: Observation, position: int) -> None:
        """Begin to record the episode of an env, if its request asks for it. `position`: the env's index in `obs`."""
        self.running.pop(env_id, None)
        if start.recorded:
            images: dict[str, list[bytes]] = {camera: [] for camera in self.info.cameras}
            self.running[env_id] = _RunningRecording(images=images, instruction=obs.instructions[position])
            self._append_observation(env_id, obs, position)

    def add_observations(self, env_ids: Array, obs: Observation) -> None:
        """Record what these envs (int64) observe before their next action, or chunk; `obs` is of all envs."""
        for env_id in env_ids.tolist():
            if env_id in self.running:
                self._append_observation(env_id, obs, env_id)

    def _append_observation(self, env_id: int, obs: Observation, position: int) -> None:
        running = self.running[env_id]
        for camera, images in running.images.items():
            images.append(encode_png(to_numpy(obs.images[camera][position])))
        state = np.zeros(0, np.float32) if obs.state is None else to_numpy(obs.state[position])
        running.states.append(np.array(state, np.float32))

    def add_chunk(self, env_ids: Array, actions: Array, result: ChunkResult, record: Mapping[str, Array]) -> None:
        """Record what these envs (int64) did: all envs' actions float32 [N, C, A], and the chunk step's record."""
        rewards = to_numpy(result.rewards)
        valid = record["valid"]
        interventions = record["source"] != ActionSource.POLICY if "source" in record else None
        for env_id in [env_id for env_id in env_ids.tolist() if env_id in self.running]:
            running = self.running[env_id]
            count = int(valid[env_id].sum())
            if self.by_step:
                running.actions += list(actions[env_id, :count])
                running.rewards += rewards[env_id, :count].tolist()
                running.interventions += [] if interventions is None else interventions[env_id, :count].tolist()
            else:
                running.actions.append(actions[env_id])
                running.rewards.append(float(rewards[env_id, :count].sum()))
                running.interventions += [] if interventions is None else [interventions[env_id]]
                running.executed.append(count)
                self._append_observation(env_id, result.obs, env_id)

    def end_episode(self, env_id: int, episode: Episode) -> None:
        """End the recording of the env's episode, and keep it if the settings say so."""
        running = self.running.pop(env_id, None)
        if running is None or not self.settings.keeps_episode(episode.success_once):
            return
        if self.settings.final_frame:
            running.actions.append(running.actions[-1])
            running.rewards.append(0.0)
            running.interventions += [False] if running.interventions else []
        n = len(running.actions)
        self.finished[env_id] = Recording(
            images={camera: tuple(images[:n]) for camera, images in running.images.items()},
            sizes=dict(self.info.cameras),
            state=np.stack(running.states[:n]),
            actions=np.stack(running.actions).astype(np.float32),
            action_names=self.info.action_names,
            state_names=self.info.state_names,
            instruction=running.instruction,
            task=episode.task,
            success=episode.success_once,
            rewards=np.array(running.rewards, np.float32),
            executed=None if self.by_step else np.array(running.executed, np.int64),
            interventions=np.array(running.interventions, bool) if running.interventions else None,
            identity=f"state {episode.state}",
        )


class FrameRecorder:
    """Recorder of the frames of episodes that keep frames, for algorithms that embed them."""

    def __init__(self, cameras: Sequence[str]) -> None:
        """Create a recorder of the frames of these cameras."""
        self.cameras = tuple(cameras)
        self.clear()

    def clear(self) -> None:
        """Drop all frames."""
        self.running: dict[int, list[dict[str, Array]]] = {}
        self.finished: dict[int, dict[str, Array]] = {}
        """Keys are those of `EpisodeRecorder`, values camera -> frames [F, H, W, 3]."""

    def begin_episode(self, env_id: int, request: EpisodeRequest, obs: Observation, position: int) -> None:
        """Begin an episode, if its request asks for frames. `position`: the env's index in `obs`."""
        self.running.pop(env_id, None)
        if request.record:
            self.running[env_id] = [self._read_frame(obs, position)]

    def add_frames(self, env_ids: Array, obs: Observation) -> None:
        """Add a frame for each of these envs; `obs` is of all envs."""
        for env_id in self.running.keys() & env_ids.tolist():
            self.running[env_id].append(self._read_frame(obs, env_id))

    def end_episode(self, env_id: int) -> None:
        """End the env's episode."""
        if env_id in self.running:
            frames = self.running.pop(env_id)
            self.finished[env_id] = {camera: np.stack([frame[camera] for frame in frames]) for camera in frames[0]}

    def _read_frame(self, obs: Observation, position: int) -> dict[str, Array]:
        return {camera: to_numpy(obs.images[camera][position]) for camera in self.cameras}
