"""Record demonstrations of a simulator's scripted expert as a data set in LeRobot's format, for `vla-rl sft`.

    python tools/record_expert.py SPEC.yaml FOLDER --episodes 100 --noise 0.02 [KEY=VALUE ...]

Runs in the interpreter that calls it, so a simulator with a separate interpreter (`env.python`) is recorded by that
one. A row is a chunk of `rollout.chunk` actions with the observation before it. Only successful episodes are kept.
Noise is added to the actions that are executed, and the recorded actions stay the expert's, as in DART.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field

from vla_rl.core.catalogue import load
from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.randomness import generator
from vla_rl.core.spec.spec import Spec, load_spec
from vla_rl.core.types import Array, Observation, to_numpy
from vla_rl.toolkit.data.lerobot import LeRobotWriter
from vla_rl.toolkit.data.recording import Recording, encode_png

FPS = 10


@define
class Demonstration:
    """Rows of one running episode."""

    instruction: str
    images: dict[str, list[bytes]]
    states: list[Array] = field(factory=list)
    actions: list[Array] = field(factory=list)
    executed: list[int] = field(factory=list)
    rewards: list[float] = field(factory=list)
    success: bool = False

    def add_observation(self, obs: Observation, index: int) -> None:
        for camera, images in self.images.items():
            images.append(encode_png(to_numpy(obs.images[camera][index])))
        self.states.append(np.zeros(0, np.float32) if obs.state is None else np.array(to_numpy(obs.state[index])))

    def recording(self, sizes: dict[str, tuple[int, int]], task: str, identity: str) -> Recording:
        return Recording(
            images=self.images,
            sizes=sizes,
            state=np.stack(self.states).astype(np.float32),
            actions=np.stack(self.actions).astype(np.float32),
            instruction=self.instruction,
            task=task,
            identity=identity,
            success=True,
            rewards=np.array(self.rewards, np.float32),
            executed=np.array(self.executed, np.int64),
        )


def demonstrations(env: Any, spec: Spec, noise: float) -> Iterator[Recording | None]:
    """Yield the expert's episodes from the training states, in turn and without end; None: one that failed."""
    info, states, attempt = env.info, env.reset_states("train"), 0
    low, high = np.float32(info.action_low), np.float32(info.action_high)
    limits = {task.name: spec.rollout.max_steps or task.max_steps for task in info.tasks}
    while True:
        numbers = np.arange(attempt, attempt + env.num_envs)
        chosen = [states[number % len(states)] for number in numbers]
        obs = env.reset(np.arange(env.num_envs), np.array([state.id for state in chosen]), numbers)
        running = {
            env_id: Demonstration(obs.instructions[env_id], {camera: [] for camera in info.cameras})
            for env_id in range(env.num_envs)
        }
        episodes = dict(running)
        for start in range(0, max(limits[state.task] for state in chosen), spec.rollout.chunk):
            labels = np.array(to_numpy(env.expert_chunk()), np.float32)
            jitter = np.stack(
                [generator(spec.seed, "expert-noise", int(n), start).standard_normal(labels.shape[1:]) for n in numbers]
            )
            active = np.isin(np.arange(env.num_envs), list(running))
            for env_id, episode in running.items():
                episode.add_observation(obs, env_id)
                episode.actions.append(labels[env_id])
            result = env.chunk_step(np.clip(labels + noise * jitter, low, high).astype(np.float32), active, True)
            obs = result.obs
            executed, rewards = to_numpy(result.executed), to_numpy(result.rewards)
            ended = (to_numpy(result.terminated) | to_numpy(result.truncated)).any(1)
            succeeded = to_numpy(result.succeeded).any(1)
            broken = env.faults()
            for env_id, episode in list(running.items()):
                count = int(executed[env_id].sum())
                episode.executed.append(count)
                episode.rewards.append(float(rewards[env_id, :count].sum()))
                episode.success = bool(succeeded[env_id]) and env_id not in broken
                limit = limits[chosen[env_id].task]
                if episode.success or ended[env_id] or env_id in broken or start + spec.rollout.chunk >= limit:
                    del running[env_id]
            if not running:
                break
        for env_id, episode in episodes.items():
            identity = f"expert, seed {spec.seed}, noise {noise:g}, number {numbers[env_id]}"
            kept = episode.success
            yield episode.recording(dict(info.cameras), chosen[env_id].task, identity) if kept else None
        attempt += env.num_envs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=100, help="successful episodes")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation, in the simulator's units")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the spec")
    arguments = parser.parse_intermixed_args()
    try:
        spec = load_spec(arguments.spec, arguments.overrides)
        env = load("env", spec.env.type, spec.plugins).build(
            spec.env.config, EnvContext(num_envs=spec.env.num_envs, chunk=spec.rollout.chunk)
        )
        with LeRobotWriter(arguments.folder, fps=FPS, robot=spec.env.type) as writer:
            good = 0
            for tried, recording in enumerate(demonstrations(env, spec, arguments.noise), 1):
                if recording is not None:
                    good += writer.add(recording)
                print(f"{good} of {arguments.episodes} episodes, {tried} tried", file=sys.stderr)
                if good == arguments.episodes:
                    break
                if tried >= 3 * arguments.episodes:
                    raise UserError(f"the expert solved {good} of {tried} episodes; {arguments.episodes} were wanted")
        env.close()
    except (UserError, SpecError) as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
