"""Scenes that are broken in one place; each names what `check_env` has to say of it."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import numpy as np
import unusual_scenes
from small_simulators import LIMIT, Scene, small_info

from vla_rl.core.randomness import generator
from vla_rl.toolkit.envs.single_env import Outcome

COUNTER = itertools.count()


class NoEvalState(Scene):
    """expected eval state 100,"""

    def scene(self, state: int, seed: int) -> tuple[float, float]:
        return [Scene.scene(self, i, seed) for i in range(100)][state]


class OneEvalStateMissing(Scene):
    """expected eval state 105 to be entered"""

    def reset(self, state: int, seed: int) -> None:
        if state == 105:
            raise KeyError(state)
        super().reset(state, seed)


class LastTrainStateMissing(Scene):
    """expected train state 7 to be entered"""

    def reset(self, state: int, seed: int) -> None:
        if state == 7:
            raise KeyError(state)
        super().reset(state, seed)


class EvalIsTrain(Scene):
    """expected scenes that differ between train and eval"""

    def scene(self, state: int, seed: int) -> tuple[float, float]:
        return super().scene(state % 100, seed)


class OneSceneInBoth(Scene):
    """expected scenes that differ between train and eval"""

    def scene(self, state: int, seed: int) -> tuple[float, float]:
        return super().scene({103: 5}.get(state, state), seed)


class IdsIgnored(Scene):
    """expected another observation for another state id"""

    def scene(self, state: int, seed: int) -> tuple[float, float]:
        return 0.0, 0.8

    def told(self) -> str:
        return self.info.tasks[0].instruction


class SceneOfSeed(Scene):
    """expected the same scene for the same state id, whatever the seed"""

    def scene(self, state: int, seed: int) -> tuple[float, float]:
        return super().scene((state + 2 * seed) % 10**9, seed)


class StartsAgain(Scene):
    """expected the final observation of the episode that ended"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        if outcome.terminated or outcome.truncated:
            self.reset(self.state, 0)
        return outcome


class StartsNext(Scene):
    """expected the final observation of the episode that ended"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        if outcome.terminated or outcome.truncated:
            self.reset((self.state + 2) % 8, 0)
        return outcome


class StartsNextWhenCut(Scene):
    """expected the final observation of the episode that ended"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        if outcome.truncated:
            self.reset((self.state + 2) % 8, 0)
        return outcome


class StartsElsewhere(Scene):
    """expected the final observation of the episode that ended"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        if outcome.terminated or outcome.truncated:
            self.place, self.speed, self.grip, self.steps = 0.01 + self.place / 100, 0.0, 0.0, 0
        return outcome


class AlwaysSuccess(Scene):
    """success: expected False until the task is solved"""

    def step(self, action: Any) -> Outcome:
        return super().step(action)._replace(success=True)


class NeverSuccess(Scene):
    """success: expected success where an episode ends with the only reward"""

    def step(self, action: Any) -> Outcome:
        return super().step(action)._replace(success=False)


class OppositeSuccess(Scene):
    """success: expected success where an episode ends with the only reward"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        return outcome._replace(success=not outcome.success)


class EveryEndIsASuccess(Scene):
    """expected success where an end is rewarded"""

    def step(self, action: Any) -> Outcome:
        """gym-hil 0.1.14 with `success: terminated`: leaving the area terminates too."""
        outcome = super().step(action)
        return outcome._replace(success=outcome.terminated)


class SuccessStays(Scene):
    """success True instead of False|succeeded True instead of False"""

    once = False

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        self.once |= outcome.success
        return outcome._replace(success=self.once)


class RewardStays(Scene):
    """expected the same episode again after other ones|equal observations"""

    total = 0.0

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        self.total += outcome.reward
        return outcome._replace(reward=self.total)


class ByEnvNumber(Scene):
    """the same episode in another env"""

    def move(self, action: Any) -> None:
        super().move(action)
        self.place += 0.01 * self.number


class ByEnvNumberAtReset(Scene):
    """the same episode in another env"""

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.place += 0.01 * self.number


class HiddenByEnvNumber(Scene):
    """the same episode in another env|the same end in another env"""

    def solved(self) -> bool:
        return abs(self.place - self.mark) < 0.15 + 0.1 * self.number


class ActionsIgnored(Scene):
    """expected other observations, rewards or ends after other actions"""

    def move(self, action: Any) -> None:
        super().move(np.array([0.3, 0.1]))


class StandsStill(Scene):
    """expected other observations, rewards or ends after other actions"""

    def move(self, action: Any) -> None:
        pass


class Noise(Scene):
    """derive everything random from state id and seed"""

    def move(self, action: Any) -> None:
        super().move(action)
        self.place += 0.01 * (next(COUNTER) % 7)


class NoiseAtReset(Scene):
    """derive everything random from state id and seed"""

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.place += 0.001 * (next(COUNTER) % 7)


class BlockOfAnotherGenerator(unusual_scenes.SmallBlock):
    """with a region whose mean colour differs by"""

    def draw_block(self, state: int) -> float:
        """gym-hil 0.1.14: the seed does not reach what places the block."""
        return float(np.random.uniform(-1, 1))  # noqa: NPY002 - what is wrong with it


class GoalBeforeTheSeed(Scene):
    """expected the same episode again after other ones|equal observations for equal state ids and actions|the same end"""

    info = small_info(state_dim=2)
    draws = generator(0, "goal")

    def reset(self, state: int, seed: int) -> None:
        """Meta-World 3.1.1: the goal, which is not shown, is drawn before the seed arrives."""
        goal = 0.5 + 0.5 * self.draws.random()
        super().reset(state, seed)
        self.mark = float(np.copysign(goal, self.mark))
        self.draws = generator(state, "goal")

    def numbers(self) -> Any:
        return np.array([self.place, self.grip], np.float32)

    def image(self) -> Any:
        image = super().image()
        image[1:4] = 0
        image[0, : self.state % 24] = 99
        return image


class NoiseLate(Scene):
    """the same episode again|equal observations"""

    def move(self, action: Any) -> None:
        super().move(action)
        if self.steps > 8:
            self.place += 0.1 * (next(COUNTER) % 7)


class EvalIsDrawnAnew(Scene):
    """expected equal observations when a state is entered again"""

    def scene(self, state: int, seed: int) -> tuple[float, float]:
        return super().scene(state if state < 100 else 1000 + 2 * next(COUNTER) + state % 2, seed)


class EvalBreaks(Scene):
    """the eval table has no floor"""

    def move(self, action: Any) -> None:
        super().move(action)
        if self.state >= 100 and self.steps == 3:
            raise RuntimeError("the eval table has no floor")


class SpeedStays(Scene):
    """expected the same episode again|equal observations"""

    def reset(self, state: int, seed: int) -> None:
        speed = self.speed
        super().reset(state, seed)
        self.speed = speed


class StepsStay(Scene):
    """expected the same episode again|equal observations"""

    def reset(self, state: int, seed: int) -> None:
        steps = self.steps
        super().reset(state, seed)
        self.steps = steps % 7


class WearsOut(Scene):
    """expected the same episode again|equal observations"""

    episodes = 0

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.episodes += 1

    def move(self, action: Any) -> None:
        super().move(np.asarray(action) * 0.99**self.episodes)


class PlaceStays(Scene):
    """expected equal observations|the same episode again"""

    def reset(self, state: int, seed: int) -> None:
        place = self.place
        super().reset(state, seed)
        self.place = place


class ShowsThePast(Scene):
    """expected equal observations|the same episode again"""

    before: Any = None

    def reset(self, state: int, seed: int) -> None:
        self.before = super().numbers()
        super().reset(state, seed)

    def step(self, action: Any) -> Outcome:
        self.before = None
        return super().step(action)

    def numbers(self) -> Any:
        return super().numbers() if self.before is None else self.before


class ImageStays(Scene):
    """expected the image of camera 'top' to show what was done"""

    info = small_info(state_dim=0)
    shown: Any = None

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.shown = super().image()

    def image(self) -> Any:
        return super().image() if self.shown is None else self.shown.copy()


class EverythingStays(ImageStays):
    """expected the image of camera 'top' or the state to show what was done"""

    info = small_info()

    def numbers(self) -> Any:
        return np.array([0, self.mark, 0], np.float32)


class SmallValues(Scene):
    """expected values from 0 to 255, got nothing above 1"""

    def image(self) -> Any:
        return super().image() // 250


class TurnedImage(Scene):
    """uint8 [24, 8, 3]|[3, 24, 8, 3]|[1, 24, 8, 3]"""

    def image(self) -> Any:
        return super().image().transpose(1, 0, 2).copy()


class NotANumber(Scene):
    """NaN or inf|not finite"""

    def numbers(self) -> Any:
        return super().numbers() if abs(self.place) < 1.2 else np.full(3, np.nan, np.float32)


class OtherInstruction(Scene):
    """expected instruction 'go right to the mark', got go left|expected instruction 'go left to the mark', got go right"""

    def told(self) -> str:
        return self.info.tasks[1 - self.state % 2].instruction


class OneInstruction(Scene):
    """expected instruction 'go right to the mark', got go left"""

    def told(self) -> str:
        return self.info.tasks[0].instruction


class OtherInstructionInEval(Scene):
    """expected instruction"""

    def told(self) -> str:
        return self.info.tasks[(self.state + (self.state >= 100)) % 2].instruction


class InstructionChanges(Scene):
    """expected instruction"""

    def told(self) -> str:
        return self.info.tasks[(self.state + (self.steps > 5)) % 2].instruction


class SmallSeeds(Scene):
    """expected seeds up to 2**63 - 1 to be taken"""

    def reset(self, state: int, seed: int) -> None:
        if seed >= 2**32:
            raise ValueError("Seed must be between 0 and 2**32 - 1")
        super().reset(state, seed)


class BreaksAtBounds(Scene):
    """no way to push that hard"""

    def move(self, action: Any) -> None:
        if abs(action[0]) == 1.0:
            raise ValueError("no way to push that hard")
        super().move(action)


class BreaksLate(Scene):
    """the spring is overwound"""

    def move(self, action: Any) -> None:
        if self.steps == LIMIT - 1:
            raise RuntimeError("the spring is overwound")
        super().move(action)


class BreaksAtItsEnd(Scene):
    """no next level"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        if outcome.terminated:
            raise RuntimeError("no next level")
        return outcome


class BreaksAlways(Scene):
    """nothing is installed"""

    def reset(self, state: int, seed: int) -> None:
        raise RuntimeError("nothing is installed")


class WideImages(Scene):
    """got uint16|is uint16"""

    def image(self) -> Any:
        return super().image().astype(np.uint16)


class BreaksInTheSecondEpisode(Scene):
    """already running"""

    def reset(self, state: int, seed: int) -> None:
        if self.steps:
            raise RuntimeError("already running")
        super().reset(state, seed)


class NotANumberReward(Scene):
    """rewards: expected finite numbers|rewards are not finite"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        return outcome._replace(reward=float("nan")) if outcome.truncated else outcome


class RewardOfSeed(Scene):
    """the same episode again|equal observations"""

    def step(self, action: Any) -> Outcome:
        return super().step(action)._replace(reward=float(generator(next(COUNTER), "reward").random()))


class GripperIsShared(Scene):
    """alone as with others|the same episode|equal observations"""

    grips: dict[str, float] = {}  # noqa: RUF012 - shared on purpose

    def move(self, action: Any) -> None:
        super().move(action)
        self.place += 0.02 * self.grips.get("last", 0.0)
        self.grips["last"] = self.grip


class LooksAtTheClock(Scene):
    """the same episode|equal observations"""

    moves = itertools.count()

    def move(self, action: Any) -> None:
        super().move(action)
        self.place += 0.05 * (next(self.moves) % 500 > 250)


class EndsByTotalSteps(Scene):
    """the same episode|equal observations"""

    total = 0

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        self.total += 1
        return outcome._replace(truncated=self.total % LIMIT == 0 and not outcome.terminated)


class LookingMoves(Scene):
    """the same episode with chunks of other lengths"""

    def image(self) -> Any:
        self.speed += 0.05
        return super().image()


class WrongImageSize(Scene):
    """uint8"""

    info = small_info(cameras={"top": (24, 8)})


class WrongStateSize(Scene):
    """state"""

    info = small_info(state_dim=4)


class BadBounds(Scene):
    """expected finite action_low < action_high"""

    info = small_info(action_low=(1.0, 0.0))


class EndlessBounds(Scene):
    """expected finite action_low < action_high"""

    info = small_info(action_high=(1.0, float("inf")))


class NoSteps(Scene):
    """expected max_steps >= 1 of 'left'"""

    info = small_info(tasks=tuple(attrs.evolve(task, max_steps=0) for task in small_info().tasks))


# ------------------------------------------------------------------------------------- with an expert only


class ExpertMoves(Scene):
    """expert_chunk: expected no effect on the envs"""

    def expert(self, length: int) -> Any:
        actions = super().expert(length)
        self.place += 0.02
        return actions


class ExpertPushes(Scene):
    """expert_chunk: expected no effect on the envs"""

    def expert(self, length: int) -> Any:
        actions = super().expert(length)
        self.speed *= 0.9
        return actions


class ExpertCounts(Scene):
    """expert_chunk: expected no effect on the envs"""

    def expert(self, length: int) -> Any:
        self.steps += 1
        return super().expert(length)


class ExpertOutside(Scene):
    """expected actions within info.action_low..action_high"""

    def expert(self, length: int) -> Any:
        return 5 * super().expert(length)


class ExpertLost(Scene):
    """expert_chunk: expected success in 50% of train states"""

    def expert(self, length: int) -> Any:
        return -super().expert(length)


class ExpertBreaks(Scene):
    """no plan"""

    def expert(self, length: int) -> Any:
        raise RuntimeError("no plan")


class NeverSuccessByRewardEither(Scene):
    """expert_chunk: expected success in 50% of train states"""

    def step(self, action: Any) -> Outcome:
        return super().step(action)._replace(success=False, reward=0.0)


EXPERTS = (ExpertMoves, ExpertPushes, ExpertCounts, ExpertOutside, ExpertLost, ExpertBreaks, NeverSuccessByRewardEither)
BATCH_ONLY = (WrongImageSize, WrongStateSize, NoSteps)
"""An env's own checks, or its place, say it in other words."""
SCENES = tuple(
    kind
    for kind in vars().copy().values()
    if isinstance(kind, type) and issubclass(kind, Scene) and kind not in (Scene, *EXPERTS)
)
