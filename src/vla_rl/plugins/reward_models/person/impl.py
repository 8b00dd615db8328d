"""A person as a reward model: answers, deadlines and the safety stop, whatever the person answers through."""

from __future__ import annotations

from time import monotonic

import numpy as np

from vla_rl.core.errors import NobodyAnswered, SafetyStop, UserError
from vla_rl.core.interrupts import StopRequested
from vla_rl.core.reward_models import RewardModel
from vla_rl.core.types import Array, Context, Observation, to_numpy
from vla_rl.plugins.reward_models.person import PersonConfig
from vla_rl.plugins.reward_models.person.page import PagePanel
from vla_rl.plugins.reward_models.person.panel import Answer, Panel
from vla_rl.plugins.reward_models.person.terminal import TerminalPanel

RUNNING = "the robot acts: press success or failure when the episode is over"
RESET = "reset the scene: ready?"
ASKED_S = 0.1
"""Seconds between looks at whether the run has to stop, while a person is waited for."""
THANKS = "thank you"
OUTCOME = "the episode is over: was it a success?"


class PersonRewards(RewardModel):
    """Success and failure by a person, who watches one robot."""

    deterministic = False
    watches = True

    def __init__(self, config: PersonConfig, context: Context) -> None:
        """Open the page or the terminal. Raises UserError for several envs, and for a camera that is not there."""
        if context.num_envs > 1:
            raise UserError(
                f"rewards: a person watches one robot at a time, and this worker has {context.num_envs}; give "
                "env.num_envs: 1"
            )
        cameras = tuple(context.env.cameras) if context.env is not None else ()
        if config.camera is not None and config.camera not in cameras:
            raise UserError(
                f"rewards.camera: the simulator has no camera {config.camera!r}; it has: {', '.join(cameras) or 'none'}"
            )
        self.waits_s = config.deadline_s
        self._config = config
        self._camera = config.camera or next(iter(cameras), None)
        self._answer: Answer | None = None
        """Answer about the running episode."""
        self.panel: Panel
        if config.ask == "page":
            self.panel = PagePanel(config.port, config.address_file)
        else:
            self.panel = TerminalPanel(config.terminal)

    def before_reset(self, env_ids: Array) -> None:
        """Wait until the person has reset the scene. Raises SafetyStop."""
        if self._config.reset:
            self._ask(RESET, ("ready",))
        self._answer = None
        self.panel.show(RUNNING, ("success", "failure"))

    def watch(self, obs: Observation | None) -> None:
        """Show the picture, and note an answer. Raises SafetyStop."""
        if obs is not None and self._camera is not None:
            self.panel.show_picture(to_numpy(obs.images[self._camera][0]))
        answer = self.panel.take(0.0)
        self._check_stop(answer)
        self._answer = answer or self._answer

    def success_probability(self, obs: Observation, ends: Array) -> Array:
        """Return 1 or 0 by the person's answer; at the end of an episode, ask for it."""
        self.watch(obs)
        if ends[0] and self._answer is None and self._config.outcome:
            self._answer = self._ask(OUTCOME, ("success", "failure"))
        return np.array([self._answer == "success"], np.float32)

    def failed(self, obs: Observation) -> Array:
        return np.array([self._answer == "failure"])

    def close(self) -> None:
        self.panel.close()

    def _ask(self, question: str, answers: tuple[Answer, ...]) -> Answer:
        """Wait for an answer. Raises SafetyStop, NobodyAnswered when the deadline has passed, and StopRequested."""
        self.panel.show(question, answers)
        end = monotonic() + self._config.deadline_s
        answer = None
        while answer is None and (left := end - monotonic()) > 0:
            if self.stop_requested():
                raise StopRequested
            answer = self.panel.take(min(left, ASKED_S))
        self._check_stop(answer)
        if answer is None:
            raise NobodyAnswered(
                f"nobody answered {question!r} at {self.panel.place} within {self._config.deadline_s:g} s "
                "(rewards.deadline_s), so the run ends"
            )
        self.panel.show(THANKS, ())
        return answer

    def _check_stop(self, answer: Answer | None) -> None:
        if answer == "stop":
            raise SafetyStop(f"a person stopped the robot at {self.panel.place}, so the run ends")
