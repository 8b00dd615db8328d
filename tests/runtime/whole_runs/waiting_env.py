"""A plugin in one file: the scripted double, of which an env waits for another, or breaks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from vla_rl.core.contexts import EnvContext
from vla_rl.core.declarations import EnvPlugin
from vla_rl.testing.scripted import ScriptedEnv, SimulatorFault

PATIENCE = 60.0
"""Seconds after which an env that waits in vain says so."""
STEPS: dict[int, int] = {}
"""Env -> its chunk steps so far; envs of a worker share it."""
changed = threading.Condition()


@frozen(kw_only=True)
class WaitingConfig:
    trouble: Literal["none", "wait", "raise", "hang", "exit"] = "none"
    env_id: int = 2
    """Env that has the trouble."""
    told: str = ""
    """File that says that the process has ended once."""
    independent_envs: bool = True


class Waiting(ScriptedEnv):
    def __init__(self, config: WaitingConfig, context: EnvContext) -> None:
        super().__init__(context.num_envs, chunk=context.chunk, first_env=context.first_env, stamp=False)
        self.config, self.env_id = config, context.first_env

    def reset(self, env_ids: Any, state_ids: Any, seed: Any) -> Any:
        """With trouble "wait" not before another env has made 4 chunk steps, and so begun with a second episode."""
        if self.config.trouble == "wait" and self.env_id == self.config.env_id:
            with changed:
                if not changed.wait_for(
                    lambda: any(n >= 4 for env_id, n in STEPS.items() if env_id != self.env_id), PATIENCE
                ):
                    raise SimulatorFault("no other env continued")
        return super().reset(env_ids, state_ids, seed)

    def chunk_step(self, actions: Any, active: Any, stop_at_end: bool) -> Any:
        """With trouble "wait" the first step of the env before takes until the waiting env has made a step."""
        waits = self.config.trouble == "wait" and self.env_id == self.config.env_id - 1
        with changed:
            STEPS[self.env_id] = STEPS.get(self.env_id, 0) + 1
            changed.notify_all()
            if waits and not changed.wait_for(lambda: STEPS.get(self.config.env_id, 0) > 0, PATIENCE):
                raise SimulatorFault("the waiting env did not continue")
        if self.env_id == self.config.env_id and STEPS[self.env_id] == 3:
            self._break()
        return super().chunk_step(actions, active, stop_at_end)

    def _break(self) -> None:
        if self.config.trouble == "raise":
            raise SimulatorFault("the gripper fell off")
        if self.config.trouble == "hang":
            time.sleep(600)
        if self.config.trouble == "exit" and not Path(self.config.told).exists():
            Path(self.config.told).touch()
            os._exit(1)


def build(config: WaitingConfig, context: EnvContext) -> Waiting:
    return Waiting(config, context)


vla_rl_plugins = {"env": {"waiting": EnvPlugin(config=WaitingConfig, build=build, summary="envs that wait or break")}}
