"""Scenes that keep to the contract in unusual ways: `check_env` has nothing to say of them."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import numpy as np
import torch
from small_simulators import EDGE, Scene, SmallEnv, small_info

from vla_rl.core.errors import UserError
from vla_rl.core.randomness import generator
from vla_rl.core.types import ChunkResult, Observation, ResetState
from vla_rl.toolkit.envs.single_env import Outcome


class Wind(Scene):
    """Dynamics that the seed keys."""

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.wind = generator(seed, "wind")

    def move(self, action: Any) -> None:
        super().move(action)
        self.place += 0.05 * float(self.wind.normal())


class NoisyEyes(Scene):
    """Noise on every image and every number, drawn from the seed at each observation."""

    noise = generator(0, "noise")

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.noise = generator(seed, "noise", state)

    def image(self) -> Any:
        return np.clip(super().image() + self.noise.normal(0, 8, (8, 24, 3)), 0, 255).astype(np.uint8)

    def numbers(self) -> Any:
        return super().numbers() + self.noise.normal(0, 0.01, 3).astype(np.float32)


class VisibleWind(Scene):
    """The first observation tells what the seed drew."""

    info = small_info(state_dim=4)
    wind = 0.0

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.wind = float(generator(seed, "wind").normal())

    def move(self, action: Any) -> None:
        super().move(action)
        self.place += 0.01 * self.wind

    def numbers(self) -> Any:
        return np.append(super().numbers(), np.float32(self.wind))


class Needle(Scene):
    """No policy finds the mark by chance."""

    def solved(self) -> bool:
        return abs(self.place - self.mark) < 1e-4


class SmallBlock(Scene):
    """A block that is a thousandth of the image, and that no number tells of."""

    info = small_info(state_dim=2, cameras={"top": (128, 128)})
    block = 0.0

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.block = self.draw_block(state)

    def draw_block(self, state: int) -> float:
        return float(generator(state, "block").uniform(-1, 1))

    def numbers(self) -> Any:
        return np.array([self.place, self.grip], np.float32)

    def image(self) -> Any:
        image = np.zeros((128, 128, 3), np.uint8)
        for row, position, channel in ((20, self.block, 1), (60, self.mark, 2), (100, self.place, 0)):
            column = int(np.clip(64 + 38 * position, 2, 124))
            image[row : row + 4, column - 2 : column + 2, channel] = 250
        image[120:124, : 1 + int(64 * self.grip)] = 250
        return image


class Endless(Scene):
    """Nothing ever ends, nothing is ever rewarded."""

    def step(self, action: Any) -> Outcome:
        super().step(action)
        return Outcome(0.0, False, False, False)


class NoState(Scene):
    """Images only."""

    info = small_info(state_dim=0)


class Coarse(Scene):
    """Images that tell few scenes apart, and no numbers."""

    info = small_info(state_dim=0, cameras={"top": (2, 4)})

    def image(self) -> Any:
        return super().image()[2:6:2, ::6].copy()

    def move(self, action: Any) -> None:
        self.place += 0.1 * float(np.sign(action[0] + action[1] - 0.25))


class Penalties(Scene):
    """-1 for every action until the mark is reached."""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        return outcome._replace(reward=outcome.reward - 1)


class Dense(Scene):
    """Nearer is better; whoever leaves the table has got something too."""

    def step(self, action: Any) -> Outcome:
        return super().step(action)._replace(reward=float(np.exp(-abs(self.place - self.mark))))


class Alive(Needle):
    """+1 for every action until the dot falls off; the mark is never found."""

    def step(self, action: Any) -> Outcome:
        return super().step(action)._replace(reward=1.0)


class Bandit(Scene):
    """One action is an episode."""

    info = small_info(tasks=tuple(attrs.evolve(task, max_steps=1) for task in small_info().tasks))

    def step(self, action: Any) -> Outcome:
        self.move(action)
        won = float(action[0]) * self.mark > 0
        return Outcome(float(won), won, True)

    def expert(self, length: int) -> Any:
        return np.full((length, 2), (np.sign(self.mark), 0), np.float32)


class DenseBandit(Bandit):
    """One action is an episode, its reward a matter of degree, and success rare."""

    def step(self, action: Any) -> Outcome:
        self.move(action)
        quality = float(np.exp(-abs(self.place - self.mark / 5)))
        return Outcome(quality, quality > 0.9999, True)

    def expert(self, length: int) -> Any:
        way = np.clip((self.mark / 5 - self.place) / 0.2, -1, 1)
        return np.tile(np.array([way, 0], np.float32), (length, 1))


class RunsOn(Scene):
    """Success ends nothing."""

    def step(self, action: Any) -> Outcome:
        return super().step(action)._replace(terminated=False)


class Mine(Scene):
    """The mark is what has to be avoided: ends are failures, success is to be far away."""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        away = abs(self.place - self.mark) > 1
        return outcome._replace(success=away and not outcome.terminated, reward=float(away))


class Locked(Scene):
    """The arm is locked in some states; only the gripper opens."""

    def move(self, action: Any) -> None:
        super().move(action if self.state % 4 else np.array([0.0, action[1]]))


class NoGripper(Scene):
    """A number of the action does nothing."""

    def move(self, action: Any) -> None:
        super().move(np.array([action[0], 0.0]))


class Sluggish(Scene):
    """An action takes effect three steps later."""

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.queue = [np.zeros(2)] * 3

    def move(self, action: Any) -> None:
        self.queue = [*self.queue[1:], np.array(action)]
        super().move(self.queue[0])


class Blank(Scene):
    """Everything is in the numbers; the image exists because one has to."""

    def image(self) -> Any:
        return np.zeros((8, 24, 3), np.uint8)


class ImageOfTheMark(Scene):
    """The image shows where to go, and the numbers where the dot is."""

    def image(self) -> Any:
        image = super().image()
        image[..., [0, 2]] = 0
        return image


class SecondCamera(Scene):
    """One of the cameras looks at the mark only."""

    info = small_info(cameras={"top": (8, 24), "side": (8, 24)})


class Freezes(Scene):
    """After its end it stays where it is."""

    over: Outcome | None = None

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.over = None

    def step(self, action: Any) -> Outcome:
        if self.over is not None:
            return self.over._replace(reward=0.0)
        outcome = super().step(action)
        self.over = outcome if outcome.terminated or outcome.truncated else None
        return outcome


class Flags(Scene):
    """A number says whether the episode is over; the dot stops at its end."""

    info = small_info(state_dim=5)
    over = False

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.over = False

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        self.over = outcome.terminated or outcome.truncated
        self.speed *= not self.over
        return outcome

    def numbers(self) -> Any:
        return np.append(super().numbers(), np.array([self.over, self.speed], np.float32))


class ThereAndBack(Scene):
    """Solved at home, after the dot was away."""

    away = False

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.home, self.away = self.place, False

    def solved(self) -> bool:
        self.away |= abs(self.place - self.home) > 0.3
        return self.away and abs(self.place - self.home) < 0.15

    def expert(self, length: int) -> Any:
        return np.full((length, 2), (-1.0 if self.away else 1.0, 0), np.float32)


class GivesUpEarly(Scene):
    """It gives up before the step limit, sooner with some seeds."""

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.patience = 5 + seed % 5

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        return outcome._replace(truncated=self.steps >= self.patience and not outcome.terminated)


class NoLimit(Scene):
    """It leaves the step limit to core."""

    def step(self, action: Any) -> Outcome:
        return super().step(action)._replace(truncated=False)


class Millimetres(Scene):
    """Large numbers."""

    def numbers(self) -> Any:
        return super().numbers() * np.float32(1e4)


class Jitter(Scene):
    """Rounding that depends on no key."""

    count = itertools.count()

    def numbers(self) -> Any:
        return super().numbers() + np.float32(1e-6 * (next(self.count) % 3))


class Retold(Scene):
    """The seed words the task."""

    info = small_info(tasks=tuple(attrs.evolve(task, instruction_varies=True) for task in small_info().tasks))
    words = "reach"

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.words = ("reach", "touch", "go to")[seed % 3]

    def told(self) -> str:
        return f"{self.words} the mark on the {self.info.tasks[self.state % 2].name}"


class Long(Scene):
    """Episodes of hundreds of actions, which creep."""

    info = small_info(tasks=tuple(attrs.evolve(task, max_steps=150) for task in small_info().tasks))

    def step(self, action: Any) -> Outcome:
        return super().step(action)._replace(truncated=False)

    def move(self, action: Any) -> None:
        super().move(np.asarray(action) / 10)

    def expert(self, length: int) -> Any:
        return np.full((length, 2), (np.sign(self.mark - self.place), 0), np.float32)


class SolvedAtOnce(Scene):
    """In some states any first action solves the task."""

    def solved(self) -> bool:
        return super().solved() or (self.state % 3 == 0 and self.steps == 0)


class Bonus(Scene):
    """10 at the mark, -10 for a fall."""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        return outcome._replace(reward=10.0 if outcome.success else -10.0 if abs(self.place) > EDGE else 0.0)


class MovingExpert(Scene):
    """An expert that varies what it advises, without effect on the env."""

    count = itertools.count()

    def expert(self, length: int) -> Any:
        actions = super().expert(length)
        actions[:, 1] = 0.1 * (next(self.count) % 5)
        return actions


class Fixed(Scene):
    """Train and eval differ in what is hidden only: how heavy the dot is."""

    def scene(self, state: int, seed: int) -> tuple[float, float]:
        return 0.0, (1.0 if state % 2 else -1.0)

    def move(self, action: Any) -> None:
        super().move(np.asarray(action) / (1 + (self.state % 100) / 20 + (self.state >= 100) / 3))

    def expert(self, length: int) -> Any:
        return np.full((length, 2), (np.sign(self.mark), 0), np.float32)


SCENES = tuple(
    kind
    for kind in vars().copy().values()
    if isinstance(kind, type) and issubclass(kind, Scene) and kind is not Scene and kind is not SecondCamera
)


class Tensors(SmallEnv):
    """Everything as torch tensors."""

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        return tensors(super().reset(env_ids, state_ids, seed))

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        names = ("rewards", "terminated", "truncated", "executed", "success", "succeeded")
        changed = {name: torch.from_numpy(getattr(result, name)) for name in names}
        return attrs.evolve(result, obs=tensors(result.obs), **changed)

    def expert_chunk(self) -> Any:
        return torch.from_numpy(super().expert_chunk())


def tensors(obs: Observation) -> Observation:
    images = {name: torch.from_numpy(image) for name, image in obs.images.items()}
    return attrs.evolve(obs, images=images, state=torch.from_numpy(obs.state))


class OnlySuccess(SmallEnv):
    """It does not say after which action success came."""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        return attrs.evolve(super().chunk_step(actions, active, stop_at_end), succeeded=None)


class OneStateEach(SmallEnv):
    """One state in each split."""

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return super().reset_states(split)[:1]


class ManyStates(SmallEnv):
    """Thousands."""

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        first = {"train": 0, "eval": 10**9}[split]
        return tuple(ResetState(id=first + i, task=("left", "right")[i % 2]) for i in range(3000))


class OtherTasksInEval(SmallEnv):
    """What is evaluated is never trained."""

    def reset_states(self, split: str) -> tuple[ResetState, ...]:
        return tuple(s for s in super().reset_states(split) if (s.task == "left") == (split == "train"))


class TwoCameras(SmallEnv):
    """The second camera looks at the mark only."""

    scene_type = SecondCamera

    def observe(self, env_ids: Any) -> Observation:
        obs = super().observe(env_ids)
        side = obs.images["top"].copy()
        side[:, 4:] = 0
        return attrs.evolve(obs, images={"top": obs.images["top"], "side": side})


class NoExpert(SmallEnv):
    """It has no expert."""

    def expert_chunk(self) -> Any:
        raise UserError("no expert")


BATCHES = (Tensors, OnlySuccess, OneStateEach, ManyStates, OtherTasksInEval, TwoCameras, NoExpert)
