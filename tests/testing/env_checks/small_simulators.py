"""A small simulator that keeps to the contract, as a batch and as envs; tests break it in one place at a time.

A dot with momentum on a line has to be brought to a mark; a second number of the action opens a gripper, which is shown
and does nothing. The episode ends at the mark (success), beyond the edge (failure), or after `LIMIT` actions.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from vla_rl.core.capabilities import Offloadable
from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import UserError
from vla_rl.core.hookspecs import SimEnv
from vla_rl.core.randomness import generator
from vla_rl.core.types import ChunkResult, EnvInfo, Observation, ResetState, TaskInfo
from vla_rl.toolkit.envs.settings import Processes
from vla_rl.toolkit.envs.single_env import Outcome, SingleEnv, View
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs

STATES = 8
LIMIT = 12
EDGE = 1.5
TASKS = ("left", "right")


def small_info(**changes: Any) -> EnvInfo:
    tasks = tuple(TaskInfo(name=name, instruction=f"go {name} to the mark", max_steps=LIMIT) for name in TASKS)
    known: dict[str, Any] = {
        "cameras": {"top": (8, 24)},
        "state_dim": 3,
        "action_low": (-1.0, 0.0),
        "action_high": (1.0, 0.5),
        "tasks": tasks,
    }
    return EnvInfo(**(known | changes))


def small_states(split: str) -> tuple[ResetState, ...]:
    first = {"train": 0, "eval": 100}[split]
    return tuple(ResetState(id=i, task=TASKS[i % 2]) for i in range(first, first + STATES))


class Scene:
    """One dot."""

    info = small_info()

    def __init__(self, number: int) -> None:
        self.number = number
        self.place = self.speed = self.grip = self.mark = 0.0
        self.steps = 0
        self.state = 0

    def reset(self, state: int, seed: int) -> None:
        self.state = state
        self.place, self.mark = self.scene(state, seed)
        self.speed, self.grip, self.steps = 0.0, 0.0, 0

    def scene(self, state: int, seed: int) -> tuple[float, float]:
        """Where the dot and the mark are."""
        draws = generator(state, "small").random(2)
        side = 1.0 if state % 2 else -1.0
        return float(0.3 * draws[0] - 0.15), float(side * (0.5 + 0.5 * draws[1]))

    def step(self, action: Any) -> Outcome:
        self.move(np.asarray(action))
        self.steps += 1
        solved = self.solved()
        terminated = solved or abs(self.place) > EDGE
        return Outcome(float(solved), solved, terminated, self.steps >= LIMIT and not terminated)

    def move(self, action: Any) -> None:
        self.speed = 0.5 * self.speed + 0.2 * float(action[0])
        self.place += self.speed
        self.grip = float(action[1])

    def solved(self) -> bool:
        return abs(self.place - self.mark) < 0.15

    def numbers(self) -> Any:
        return np.array([self.place, self.mark, self.grip], np.float32)

    def image(self) -> Any:
        image = np.zeros((8, 24, 3), np.uint8)
        columns = np.linspace(-1.6, 1.6, 24)
        image[1:4, np.abs(columns - self.mark) < 0.15, 1] = 250
        image[4:7, np.abs(columns - self.place) < 0.15, 0] = 250
        image[7, : int(16 * self.grip), 2] = 250
        return image

    def told(self) -> str:
        return self.info.tasks[self.state % 2].instruction

    def expert(self, length: int) -> Any:
        """At full speed to the mark, as if nothing else happened."""
        actions = np.zeros((length, 2), np.float32)
        place, speed = self.place, self.speed
        for i in range(length):
            actions[i, 0] = np.clip((self.mark - place - 0.5 * speed) / 0.2, -1, 1)
            speed = 0.5 * speed + 0.2 * actions[i, 0]
            place += speed
        return actions


class SceneEnv(SingleEnv):
    """A `Scene` as an env."""

    scene_type: type[Scene] = Scene

    def __init__(self, number: int) -> None:
        self.scene = self.scene_type(number)

    def reset(self, state_id: int, seed: int) -> None:
        self.scene.reset(state_id, seed)

    def step(self, action: Any) -> Outcome:
        return self.scene.step(action)

    def render(self) -> View:
        numbers = self.scene.numbers() if self.scene.info.state_dim else None
        return View({name: self.scene.image() for name in self.scene.info.cameras}, numbers, self.scene.told())

    def expert_chunk(self, length: int) -> Any:
        return self.scene.expert(length)


def small_envs(scene_type: type[Scene], num_envs: int = 2, chunk: int = 4, states: Any = small_states) -> SubprocEnvs:
    env_type = type("SmallEnv", (SceneEnv,), {"scene_type": scene_type})
    context = EnvContext(num_envs=num_envs, chunk=chunk)
    splits = {split: states(split) for split in ("train", "eval")}
    return SubprocEnvs(scene_type.info, splits, env_type, context, Processes(apart=False))


class SmallEnv(SimEnv, Offloadable):
    """Several `Scene`s as a batch."""

    scene_type: type[Scene] = Scene

    def __init__(self, num_envs: int = 3, chunk: int = 4) -> None:
        self.num_envs, self.chunk = num_envs, chunk
        self.info = self.scene_type.info
        self.scenes = [self.scene_type(i) for i in range(num_envs)]

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return small_states(split)

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        for env_id, state, key in zip(env_ids, state_ids, seed, strict=True):
            self.scenes[env_id].reset(int(state), int(key))
        return self.observe(env_ids)

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        shape = actions.shape[:2]
        rewards = np.zeros(shape, np.float32)
        succeeded, terminated, truncated, executed = np.zeros((4, *shape), bool)
        success = np.zeros(len(active), bool)
        for env_id in np.flatnonzero(active):
            for c in range(shape[1]):
                outcome = self.scenes[env_id].step(actions[env_id, c])
                rewards[env_id, c], succeeded[env_id, c], terminated[env_id, c], truncated[env_id, c] = outcome[:4]
                executed[env_id, c] = True
                success[env_id] = outcome.success
                if stop_at_end and (outcome.terminated or outcome.truncated):
                    break
        return ChunkResult(
            obs=self.observe(range(len(active))),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            executed=executed,
            success=success,
            succeeded=succeeded,
        )

    def expert_chunk(self) -> Any:
        return np.stack([scene.expert(self.chunk) for scene in self.scenes])

    def observe(self, env_ids: Any) -> Observation:
        scenes = [self.scenes[env_id] for env_id in env_ids]
        return Observation(
            images={name: np.stack([scene.image() for scene in scenes]) for name in self.info.cameras},
            instructions=tuple(scene.told() for scene in scenes),
            state=np.stack([scene.numbers() for scene in scenes]) if self.info.state_dim else None,
        )

    def snapshot(self) -> Any:
        return copy.deepcopy([vars(scene) for scene in self.scenes])

    def restore(self, snapshot: Any) -> None:
        for scene, saved in zip(self.scenes, snapshot, strict=True):
            vars(scene).update(copy.deepcopy(saved))


def small_batch(scene_type: type[Scene], num_envs: int = 3, chunk: int = 4) -> SmallEnv:
    env_type = type("SmallEnv", (SmallEnv,), {"scene_type": scene_type})
    return env_type(num_envs, chunk)


class NoExpertEnv(SceneEnv):
    """Without a demonstrator."""

    def expert_chunk(self, length: int) -> Any:
        raise UserError("no expert here")


class BuggyExpertEnv(SceneEnv):
    """Simulator whose demonstrator has a bug."""

    def expert_chunk(self, length: int) -> Any:
        return len(None)  # type: ignore[arg-type]
