"""Simulators that disturb their process, pay or end wrongly, or show too little; each names what `check_env` has to
say of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
from typing import Any

import attrs
import numpy as np
import torch
from small_simulators import LIMIT, Scene, SmallEnv, small_info

from vla_rl.core.types import ChunkResult, Observation
from vla_rl.toolkit.envs.single_env import Outcome


class SuccessWithoutReward(Scene):
    """rewards: expected a reward where the task is solved, got 0 for every action"""

    def step(self, action: Any) -> Outcome:
        return super().step(action)._replace(reward=0.0)


class SuccessThatEndsNothingWithoutReward(Scene):
    """rewards: expected a reward where the task is solved, got 0 for every action"""

    def step(self, action: Any) -> Outcome:
        return super().step(action)._replace(reward=0.0, terminated=False)


class SuccessIsPunished(Scene):
    """rewards: expected more for success than for failure"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        return outcome._replace(reward=-outcome.reward)


class TimeIsFailure(Scene):
    """expected truncated where an episode ends for want of time, got terminated in each of"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        return outcome._replace(terminated=outcome.terminated or outcome.truncated, truncated=False)


class OwnTimeIsFailure(Scene):
    """expected truncated where an episode ends for want of time, got terminated after 9 actions"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        return outcome._replace(terminated=outcome.terminated or self.steps >= 9, truncated=False)


class OneStepShort(Scene):
    """expected as many actions as the task's max_steps before it gives up, got 11 of 12"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        return outcome._replace(truncated=self.steps >= LIMIT - 1 and not outcome.terminated)


class SuccessIsTruncated(Scene):
    """expected terminated where an episode ends since the task is solved"""

    def step(self, action: Any) -> Outcome:
        outcome = super().step(action)
        if not outcome.success:
            return outcome
        return outcome._replace(terminated=False, truncated=True)


class SeedsNumpy(Scene):
    """reset: expected the global generator of NumPy left alone, got seeded"""

    def reset(self, state: int, seed: int) -> None:
        np.random.seed(seed % 2**32)  # noqa: NPY002 - what is wrong with it
        super().reset(state, seed)


class SeedsRandom(Scene):
    """reset: expected the global generator of Python left alone, got seeded"""

    def reset(self, state: int, seed: int) -> None:
        random.seed(seed)
        super().reset(state, seed)


class SeedsTorch(Scene):
    """reset: expected the global generator of torch left alone, got seeded"""

    def reset(self, state: int, seed: int) -> None:
        torch.manual_seed(seed)
        super().reset(state, seed)


class SeedsInSteps(Scene):
    """chunk_step: expected the global generator of NumPy left alone, got seeded"""

    def move(self, action: Any) -> None:
        np.random.seed(self.steps)  # noqa: NPY002 - what is wrong with it
        super().move(action)


class LeavesFilesOpen(Scene):
    """expected as many open files after each episode"""

    def reset(self, state: int, seed: int) -> None:
        self.logs = [*getattr(self, "logs", []), open(os.devnull, "w")]  # noqa: SIM115, PTH123 - what is wrong with it
        super().reset(state, seed)


class LeavesFolders(Scene):
    """expected as many temporary files or folders after each episode"""

    def reset(self, state: int, seed: int) -> None:
        tempfile.mkdtemp()
        super().reset(state, seed)


class StartsThreads(Scene):
    """expected as many threads after each episode|no thread left"""

    def reset(self, state: int, seed: int) -> None:
        stop = threading.Event()
        threading.Timer(60, stop.set).start() if not state else None
        super().reset(state, seed)
        self.stops = [*getattr(self, "stops", []), stop]


class ChangesFolder(Scene):
    """working folder: expected"""

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        os.chdir(os.sep)


class ChangesTorch(Scene):
    """torch.get_default_dtype(): expected torch.float32, got torch.float64"""

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        torch.set_default_dtype(torch.float64)


SCENES = tuple(
    kind for kind in vars().copy().values() if isinstance(kind, type) and issubclass(kind, Scene) and kind is not Scene
)


class LeavesAProcess(SmallEnv):
    """close: expected no process left"""

    server: Any = None

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        if self.server is None:
            self.server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
        return super().reset(env_ids, state_ids, seed)


class LeavesAThread(SmallEnv):
    """close: expected no thread left, got 'renderer'"""

    over: Any = None

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        if self.over is None:
            self.over = threading.Event()
            threading.Thread(target=self.over.wait, args=(20,), name="renderer", daemon=True).start()
        return super().reset(env_ids, state_ids, seed)


class Mosaic(Scene):
    """Two cameras."""

    info = small_info(cameras={"top": (8, 24), "side": (8, 24)})


class CamerasAlike(SmallEnv):
    """image 'side': expected its own view, got the image of camera 'top'"""

    scene_type = Mosaic


class CamerasShareABuffer(SmallEnv):
    """image 'side': expected its own view, got the image of camera 'top'"""

    scene_type = Mosaic

    def observe(self, env_ids: Any) -> Observation:
        obs = super().observe(env_ids)
        image = obs.images["top"]
        image[:, 4:] = 0
        return attrs.evolve(obs, images={"top": image, "side": image})


class CamerasSwap(SmallEnv):
    """got the image of camera"""

    scene_type = Mosaic

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        obs = super().reset(env_ids, state_ids, seed)
        return attrs.evolve(obs, images={"top": obs.images["side"], "side": obs.images["top"]})

    def observe(self, env_ids: Any) -> Observation:
        obs = super().observe(env_ids)
        side = 50 + obs.images["top"][:, ::-1] // 2
        return attrs.evolve(obs, images={"top": obs.images["top"], "side": side})


class RewardsOfOtherEnvs(SmallEnv):
    """another env|alone as with others|the same"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        return attrs.evolve(result, rewards=np.roll(result.rewards, 1, 0) * result.executed)


class RewardsByEnvNumber(SmallEnv):
    """another env|alone as with others|the same"""

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> ChunkResult:
        result = super().chunk_step(actions, active, stop_at_end)
        weights = np.arange(1, len(active) + 1, dtype=np.float32)[:, None]
        return attrs.evolve(result, rewards=result.rewards * weights)


class NegativeIds(SmallEnv):
    """expected ids from 0 to 2**63 - 1, got -8 to -1"""

    def reset_states(self, split: str) -> Any:
        states = super().reset_states(split)
        return states if split == "eval" else tuple(attrs.evolve(s, id=s.id - 8) for s in states)

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        return super().reset(env_ids, np.where(state_ids < 0, state_ids + 8, state_ids), seed)


class LeavesAFolder(SmallEnv):
    """Makes a folder where it is built, and lets it be."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cache = tempfile.mkdtemp()


class SeedsWhereItIsBuilt(SmallEnv):
    """Seeds the global generator once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        random.seed(0)


class DrawsWhereItIsBuilt(SmallEnv):
    """Moves the dots of all scenes by what the global generator gives while it is built."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shift = float(np.random.uniform(-0.1, 0.1))  # noqa: NPY002 - what is wrong with it

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Observation:
        super().reset(env_ids, state_ids, seed)
        for env_id in env_ids:
            self.scenes[env_id].place += self.shift
        return self.observe(env_ids)


BATCHES = tuple(
    kind
    for kind in vars().copy().values()
    if isinstance(kind, type)
    and issubclass(kind, SmallEnv)
    and kind not in (SmallEnv, LeavesAFolder, SeedsWhereItIsBuilt, DrawsWhereItIsBuilt)
)
