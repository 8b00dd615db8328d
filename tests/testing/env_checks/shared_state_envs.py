"""Envs that play right only where each has a separate process. Light: their processes import it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
from small_simulators import Scene, SceneEnv

SPEEDS: dict[str, float] = {}


class SharesAVariable(SceneEnv):
    """Keeps its speed in a variable of the module, which each process has once."""

    class scene_type(Scene):
        """A `Scene`, but for the variable."""

        def reset(self, state: int, seed: int) -> None:
            super().reset(state, seed)
            SPEEDS["last"] = 0.0

        def move(self, action: Any) -> None:
            self.speed = SPEEDS["last"]
            super().move(action)
            SPEEDS["last"] = self.speed


class SharesAGenerator(SceneEnv):
    """Seeds the global generator in its reset and draws from it in steps, as if it were alone."""

    class scene_type(Scene):
        """A `Scene` in the wind."""

        def reset(self, state: int, seed: int) -> None:
            super().reset(state, seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 - what is wrong with it

        def move(self, action: Any) -> None:
            super().move(action)
            self.place += 0.05 * float(np.random.standard_normal())  # noqa: NPY002


ENVS = (SharesAVariable, SharesAGenerator)


class StartsAServer(SceneEnv):
    """Starts a separate program, as envs of a game engine do, and has no chance to end it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.server = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])


class LeavesFilesOpen(SceneEnv):
    """Opens a file in each reset, in the env's process."""

    def reset(self, state_id: int, seed: int) -> None:
        self.logs = [*getattr(self, "logs", []), open(os.devnull, "w")]  # noqa: SIM115, PTH123 - what is wrong with it
        super().reset(state_id, seed)
