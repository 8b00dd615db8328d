"""A plugin in one file: a `SingleEnv` of the scripted double's game in which a scripted person takes over."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from vla_rl.core.contexts import EnvContext
from vla_rl.core.declarations import EnvPlugin
from vla_rl.core.errors import UserError
from vla_rl.core.types import ActionSource, EnvInfo, ResetState, TaskInfo
from vla_rl.toolkit.envs.settings import Processes
from vla_rl.toolkit.envs.single_env import Outcome, SingleEnv, View
from vla_rl.toolkit.envs.subproc_envs import SubprocEnvs

LENGTH = 6


@frozen(kw_only=True)
class HelpedConfig:
    first: int = 3
    """Step, from 0, at which the person takes over; LENGTH: never."""
    last: int = 4
    """Last step of the takeover."""
    push: float = 0.75
    """Size of the person's actions, towards the target."""
    each: int = 2
    """The person takes over in states whose id is a multiple of it."""
    late: int | None = None
    """Step that begins late, with actions in real time; None: no real time."""
    unplugged: int | None = None
    """Step, from 0, at which the person's device is gone; None: never."""
    dimensions: int = 2
    """Numbers of the person's actions; right are 2."""
    announced: bool = True
    """`EnvInfo.takeovers`."""


@frozen
class MakeHelped:
    config: HelpedConfig

    def __call__(self, number: int) -> Helped:
        return Helped(self.config)


class Helped(SingleEnv):
    """The first dimension of the actions, summed, must have the sign of the state's first number."""

    def __init__(self, config: HelpedConfig) -> None:
        self.config = config

    def reset(self, state_id: int, seed: int) -> None:
        self.state_id = state_id
        self.target = 1.0 if np.random.default_rng(state_id).random() < 0.5 else -1.0
        self.steps = 0
        self.push = 0.0

    def step(self, action: np.ndarray) -> Outcome:
        if self.steps == self.config.unplugged:
            raise UserError("person: the takeover device 'lever' is not there any more")
        source = ActionSource.POLICY
        if self.state_id % self.config.each == 0 and self.config.first <= self.steps <= self.config.last:
            source = ActionSource.PERSON
            action = np.zeros(self.config.dimensions, np.float32)
            action[0] = self.config.push * self.target
        self.steps += 1
        self.push += float(action[0])
        over = self.steps == LENGTH
        won = over and self.push * self.target > 0
        executed = None if source == ActionSource.POLICY else action
        late = self.steps - 1 == self.config.late
        return Outcome(float(won), won, terminated=over, source=source, executed_action=executed, late=late)

    def render(self) -> View:
        image = np.full((8, 8, 3), 128 + 60 * int(self.target), np.uint8)
        image[0] = self.state_id
        return View({"main": image}, np.array([self.target, self.steps / LENGTH], np.float32))


def helped_envs(config: HelpedConfig, context: EnvContext) -> SubprocEnvs:
    info = EnvInfo(
        cameras={"main": (8, 8)},
        state_dim=2,
        action_low=(-1.0, -1.0),
        action_high=(1.0, 1.0),
        tasks=(TaskInfo(name="sign", instruction="follow the sign", max_steps=LENGTH + 2),),
        takeovers=config.announced,
        control_hz=None if config.late is None else 10.0,
    )
    states = {
        "train": [ResetState(id=i, task="sign") for i in range(32)],
        "eval": [ResetState(id=i, task="sign") for i in range(32, 48)],
    }
    processes = Processes(apart=None if config.late is not None else False)
    return SubprocEnvs(info, states, MakeHelped(config), context, processes)


vla_rl_plugins = {"env": {"helped": EnvPlugin(config=HelpedConfig, build=helped_envs, summary="a person takes over")}}
